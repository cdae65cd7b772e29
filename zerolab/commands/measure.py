"""zerolab measure: a stage or a peer on real ranks, or a dry run of a model of any size."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from typing import Any

from zerolab.commands.offload import add_offload, add_time, expect_offload, measure_below

DRY_ONLY = {"model", "tokens", "recompute", "rank"}
OF_A_STAGE = {"recipe", "clip", "overlap", "prefetch", "device_memory", "offload"}
NOT_OFFLOADED = {"micro_batches", "clip", "overlap", "prefetch", "device_memory"}


def add_measure(commands: Any) -> None:
    """Adds the command."""
    measure = commands.add_parser(
        "measure",
        help="train on real ranks and count their bytes",
        description="Counts what each rank holds and sends, beside the formula. With --dry-run "
        "the same code runs without memory and without other ranks, for models of any size; "
        "with --peer it is PyTorch's or DeepSpeed's.",
    )
    measure.add_argument("--stage", type=int, help="ZeRO stage")
    measure.add_argument("--peer", help="ddp, zero-redundancy, fsdp2, fsdp2-no-reshard, …")
    measure.add_argument("--ranks", type=int, required=True, help="how many processes")
    measure.add_argument("--steps", type=int, help="optimizer steps (default 10)")
    measure.add_argument("--recipe", help="precision recipe (default adamw-mixed)")
    measure.add_argument("--micro-batches", type=int, help="per rank and step (default 1)")
    measure.add_argument("--clip", "--max-norm", type=float, help="largest norm of the gradient")
    measure.add_argument("--overlap", action="store_true", default=None,
                         help="reduce during backward (2, 3)")  # fmt: skip
    measure.add_argument("--prefetch", action="store_true", default=None,
                         help="gather the next unit early (3)")  # fmt: skip
    measure.add_argument("--device-memory", metavar="SIZE", help="of a toy device, such as '2 MB'")
    add_offload(measure)
    add_time(measure)
    measure.add_argument("--json", action="store_true", help="print one JSON object")
    dry = measure.add_argument_group("a dry run")
    dry.add_argument("--dry-run", action="store_true", help="no memory, and ranks that are not")
    dry.add_argument("--model", help="such as gpt3-175b, llama2-7b")
    dry.add_argument("--tokens", type=int, help="in a rank's one sequence (default 128)")
    dry.add_argument("--recompute", action="store_true", default=None,
                     help="blocks keep their inputs alone")  # fmt: skip
    dry.add_argument("--rank", type=int, help="whose bytes are counted (default 0)")
    measure.set_defaults(run=_measure)


def _measure(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if value is not None}
    if (options.stage is None) == (options.peer is None):
        raise ValueError("Give --stage or --peer: one of them is measured.")
    if options.peer and (extra := OF_A_STAGE & set(given)):
        raise ValueError(f"A peer has ways of its own: leave out {_typed(extra)}.")
    if options.offload and (extra := (NOT_OFFLOADED | DRY_ONLY) & set(given)):
        raise ValueError(f"With --offload leave out {_typed(extra)}.")
    expect_offload(options)
    if options.offload:
        return measure_below(options)
    if options.time:
        raise ValueError("--time needs --offload, as in --offload optimizer=disk.")
    given["engine"] = {name: True for name in ("overlap", "prefetch") if name in given}
    if options.dry_run:
        with _few_collections():
            made = _dry(options, given)
    else:
        # what a peer prints while it sets itself up is no part of the result
        with contextlib.redirect_stdout(sys.stderr):
            made = _real(options, given)
    print(json.dumps(made.as_dict(), indent=2) if options.json else made.as_text())
    return 0 if made.agrees else 1


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """What imports and a dry run make in a hurry is no garbage: looking for it costs a tenth."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _dry(options: argparse.Namespace, given: dict[str, Any]) -> Any:
    from zerolab.course.thousand import dry_measure

    if options.model is None:
        raise ValueError("A dry run needs a model: --model llama2-7b, for one.")
    if options.steps is not None:
        raise ValueError("A dry run makes one step: leave out --steps.")
    if options.device_memory is not None:
        raise ValueError("A dry run has no memory to fill: leave out --device-memory.")
    if options.clip is not None:
        raise ValueError("A dry run has no values to clip: leave out --clip.")
    names = (DRY_ONLY | {"recipe", "micro_batches", "engine"}) - {"model"}
    more = {name: given[name] for name in names if name in given}
    return dry_measure(options.model, options.ranks, options.stage, options.peer, **more)


def _real(options: argparse.Namespace, given: dict[str, Any]) -> Any:
    if DRY_ONLY & set(given):
        raise ValueError(f"Only a dry run takes {_typed(DRY_ONLY & set(given))}: add --dry-run.")
    if options.peer:
        from zerolab.course.beside import measure_peer

        if extra := {"steps", "micro_batches"} & set(given):
            raise ValueError(f"A peer is measured in steps of one kind: leave out {_typed(extra)}.")
        return measure_peer(options.peer, options.ranks)
    from zerolab.course.measure import measure

    steps = 10 if options.steps is None else options.steps
    more = {"max_norm": options.clip, "engine": given["engine"]}
    more["device_memory"] = options.device_memory
    more |= {"micro_batches": given["micro_batches"]} if "micro_batches" in given else {}
    return measure(options.stage, options.ranks, options.recipe or "adamw-mixed", steps, **more)


def _typed(names: set[str]) -> str:
    return ", ".join(sorted(f"--{name.replace('_', '-')}" for name in names))
