"""How fast the stages are beside their peers: ratios from interleaved rounds of one run.

Absolute times say little on a shared machine. In every round each engine makes one step, one
after the other, and a pair's ratio is the median over rounds of ours divided by theirs. CPU
seconds, summed over ranks, are less disturbed by other programs than wall time; both are given.

Two kinds of runner beside the pairs say what a ratio is made of: forward and backward alone, which
no engine can save, and our stages on gloo's own collectives, whose reduce-scatter sends twice.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zerolab.practice import data
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.measure import STAGES, loopback_at_rest
from zerolab.practice.meter import Meter, label, steady
from zerolab.practice.peers import PEERS, Step, versions

MODEL = GPTConfig(context=128, width=384, layers=6, heads=6)  # 10.7 million parameters
LINES, SEQUENCES = 12, 4  # 119 tokens a sequence; the sequences are divided over the ranks
RECIPES = {"fp32": "adamw-fp32", "bf16": "adamw-mixed"}
ENGINE: dict[int, dict[str, Any]] = {2: {"overlap": True}, 3: {"overlap": True, "prefetch": True}}
PAIRS = [  # stage, peer, precision
    (0, "ddp", "fp32"),
    (1, "zero-redundancy", "fp32"),
    (2, "fsdp2-no-reshard", "bf16"),
    (3, "fsdp2", "bf16"),
    (3, "fsdp2-fp32", "fp32"),
    (1, "deepspeed-1", "bf16"),
    (2, "deepspeed-2", "bf16"),
    (3, "deepspeed-3", "bf16"),
]

Look = Callable[[], None]
RaceStep = Callable[..., Tensor]
"""Makes a step with tokens and targets; a third argument is called between backward and update."""


@dataclass(frozen=True)
class Timing:
    """One engine on one rank: seconds of each round, and bytes."""

    precision: str
    wall_s: list[float]
    cpu_s: list[float]  # of the whole process
    threads_s: list[float]  # CPU of all threads but the one that calls the engine: gloo's
    optimizer_s: list[float]  # CPU of AdamW's update
    loss: float
    held_bytes: int  # what this rank holds between backward and the update, gradients included
    sent_bytes: int  # what this rank handed to others, as its ring algorithms would send it
    wire_bytes: int | None  # what the loopback carried, all ranks together


class Stopwatch:
    """CPU seconds that this thread spent in what is between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds, self.began = 0.0, 0.0

    def start(self, *_: Any) -> None:
        self.began = time.thread_time()

    def stop(self, *_: Any) -> None:
        self.seconds += time.thread_time() - self.began

    @contextmanager
    def on_torch_optimizers(self) -> Iterator[None]:
        """Runs in the steps of every torch.optim.AdamW."""
        hooks = [
            register_optimizer_step_pre_hook(partial(self._if_adamw, self.start)),
            register_optimizer_step_post_hook(partial(self._if_adamw, self.stop)),
        ]
        yield
        for hook in hooks:
            hook.remove()

    def _if_adamw(self, act: Callable[[], None], optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.AdamW):  # others wrap one
            act()

    def around(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            self.start()
            call(*given)
            self.stop()

        return timed


def _ours(
    config: GPTConfig, stage: int, precision: str, native: bool | None, watch: Stopwatch
) -> RaceStep:
    model = GPT(config)
    options = ENGINE.get(stage, {})
    engine = STAGES[stage](model, Comm(native), recipe=RECIPES[precision], **options)
    for unit in engine.units:
        unit.adamw.update = watch.around(unit.adamw.update)
    return _stepping(engine, model.loss)


def _stepping(engine: Any, loss_of: Step) -> RaceStep:
    def step(tokens: Tensor, targets: Tensor, before_update: Look = lambda: None) -> Tensor:
        loss = label(loss_of(tokens, targets), "temporary")
        engine.backward(loss)
        before_update()
        engine.step()
        return loss.detach()

    return step


def _alone(config: GPTConfig, precision: str) -> RaceStep:
    """Forward and backward and nothing else."""
    model = GPT(config).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def step(tokens: Tensor, targets: Tensor, before_update: Look = lambda: None) -> Tensor:
        loss = label(model.loss(tokens, targets), "temporary")
        loss.backward()
        before_update()
        model.zero_grad()
        return loss.detach()

    return step


def _theirs(config: GPTConfig, peer: str) -> RaceStep:
    engine = PEERS[peer](GPT(config))
    return _stepping(engine, engine.loss)


def _makers(config: GPTConfig, watch: Stopwatch) -> dict[str, tuple[str, Callable[[], RaceStep]]]:
    """By name, precision and maker of each engine of this machine's pairs, and those beside."""
    makers: dict[str, tuple[str, Callable[[], RaceStep]]] = {}
    for stage, peer, precision in PAIRS:
        if peer in PEERS:
            ours, alone = f"stage {stage} {precision}", f"alone {precision}"
            stages = partial(_ours, config, stage, precision)
            makers.setdefault(alone, (precision, partial(_alone, config, precision)))
            makers.setdefault(ours, (precision, partial(stages, None, watch)))
            if stage >= 2:
                makers.setdefault(f"{ours} native", (precision, partial(stages, True, watch)))
            makers[peer] = precision, partial(_theirs, config, peer)
    return makers


def race(rounds: int, config: GPTConfig = MODEL) -> dict[str, Timing]:
    """Runs every engine on this rank, in turn; call it on all ranks.

    In two heats, the second with the engines made and run in reverse: whoever is made first gets
    other memory than who comes last, and is up to a tenth slower for it.
    """
    watch = Stopwatch()
    makers = _makers(config, watch)
    spent: dict[str, list[tuple[float, ...]]] = {name: [] for name in makers}
    losses: dict[str, float] = {}
    counted: dict[str, tuple[int, int, int | None]] = {}
    for heat, num_rounds in enumerate((-(-rounds // 2), rounds // 2)[:rounds]):
        order = list(makers)[:: -1 if heat else 1]
        steps = {}
        for name in order:
            steps[name] = makers[name][1]()
            for at in range(2):
                steps[name](*_batch(at))
            if not heat:
                counted[name] = _count(steps[name], _batch(2))
        with watch.on_torch_optimizers():
            for at in range(3, 3 + num_rounds):
                batch = _batch(at)
                for name in order:
                    row, loss = _timed(steps[name], batch, watch)
                    spent[name].append(row)
                    if not heat:
                        losses[name] = loss.item()
        del steps
        gc.collect()  # what an engine keeps in cycles is not the next heat's burden
    timings = {}
    for name, rows in spent.items():
        wall_s, cpu_s, threads_s, optimizer_s = (list(column) for column in zip(*rows, strict=True))
        timings[name] = Timing(
            makers[name][0], wall_s, cpu_s, threads_s, optimizer_s, losses[name], *counted[name]
        )
    return timings


def _batch(at: int) -> Sequence[Tensor]:
    """This rank's part of a batch, the same for every engine."""
    size = dist.get_world_size()
    return data.batch(at, dist.get_rank(), size, max(1, SEQUENCES // size), LINES)


def _timed(
    step: RaceStep, batch: Sequence[Tensor], watch: Stopwatch
) -> tuple[tuple[float, ...], Tensor]:
    """Seconds of a step (wall; CPU of the process, of gloo, of AdamW) and its loss."""
    dist.barrier()
    watch.seconds, wall = 0.0, time.perf_counter()
    process, thread = time.process_time(), time.thread_time()
    loss = step(*batch)
    process, thread = time.process_time() - process, time.thread_time() - thread
    dist.barrier()
    wall = time.perf_counter() - wall
    return (wall, process, process - thread, watch.seconds), loss


def _count(step: RaceStep, batch: Sequence[Tensor]) -> tuple[int, int, int | None]:
    """Bytes held, sent and on the wire, of two steps: the first shows the meter all that is held.

    The batch and the loss are no part of what an engine holds; its own buffers are.
    """
    held: list[dict[str, int]] = []
    with Meter() as meter:
        before = loopback_at_rest()
        step(*batch)
        after, sent = loopback_at_rest(), meter.sent_bytes()["total"]
        for tensor in batch:
            label(tensor, "temporary")
        step(*batch, lambda: held.append(steady(meter.held)))
    wire = None if before is None or after is None else after - before
    return held[0]["total"] - held[0]["temporary"], sent, wire


def summary(
    ranks: int, results: list[dict[str, Timing]], config: GPTConfig = MODEL
) -> dict[str, Any]:
    """Ratios, bytes and CPU seconds from every rank's timings; below 1 means that ours is faster.

    `added_cpu_ratio` compares what each adds to forward and backward, which no engine can save.
    `native_ratio` and `native_cpu_ratio` are those of the same stage on gloo's own collectives.
    """
    params, first = num_parameters(GPT(config)), results[0]

    def cpu(name: str, what: str = "cpu_s") -> list[float]:
        """Per round, the sum over ranks."""
        return [sum(each) for each in zip(*(getattr(r[name], what) for r in results), strict=True)]

    def ratios(ours: str, theirs: str) -> tuple[float | None, float | None]:
        if ours not in first:
            return None, None
        wall = _median_ratio(first[ours].wall_s, first[theirs].wall_s)
        return wall, _median_ratio(cpu(ours), cpu(theirs))

    pairs = []
    for stage, peer, precision in PAIRS:
        if peer in first:
            ours = f"stage {stage} {precision}"
            (wall, of_cpu), native = ratios(ours, peer), ratios(f"{ours} native", peer)
            alone = statistics.median(cpu(f"alone {precision}"))
            added = [statistics.median(cpu(name)) - alone for name in (ours, peer)]
            pairs.append({
                "ours": f"stage {stage}", "peer": peer, "precision": precision,
                "rounds": len(first[peer].wall_s), "ratio": wall, "cpu_ratio": of_cpu,
                "added_cpu_ratio": round(added[0] / added[1], 3) if added[1] > 0 else None,
                "native_ratio": native[0], "native_cpu_ratio": native[1],
            })  # fmt: skip
    engines = {}
    for name, timing in first.items():
        total = statistics.median(cpu(name))
        parts = {
            "forward_backward": statistics.median(cpu(f"alone {timing.precision}")),
            "optimizer": statistics.median(cpu(name, "optimizer_s")),
            "network_threads": statistics.median(cpu(name, "threads_s")),
        }
        parts["rest"] = total - sum(parts.values())
        engines[name] = {
            "median_s": round(statistics.median(timing.wall_s), 4),
            "cpu_s": round(total, 4),
            "cpu_parts_s": {part: round(seconds, 4) for part, seconds in parts.items()},
            "loss": round(timing.loss, 4),
            "held_bytes_per_parameter": round(timing.held_bytes / params, 3),
            "sent_bytes_per_parameter": round(timing.sent_bytes / params, 3),
            "wire_bytes_per_parameter": timing.wire_bytes
            and round(timing.wire_bytes / ranks / params, 3),
        }
    return {
        "ranks": ranks, "params": params, "pairs": pairs, "engines": engines, "peers": versions(),
        "note": "a step of stage n / a step of the peer, median of interleaved rounds",
    }  # fmt: skip


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)
