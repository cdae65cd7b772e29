"""Derived beside counted: the theory's bytes and the meter's, which must be the same integers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerolab.course.advice import what_would_help
from zerolab.course.columns import derived_and_counted, held_and_sent, on_the_wire
from zerolab.practice.gpt import num_parameters
from zerolab.practice.measure import STAGES, Count, Job, count, train_in_one_process
from zerolab.practice.precision import precision_of
from zerolab.practice.world import RankError, World
from zerolab.theory.memory import held_bytes
from zerolab.theory.traffic import sent_bytes

LIMIT_S = 3600.0  # for a world of its own: the number of steps is anybody's, and Ctrl-C is there
KINDS = ("parameters", "gradients", "optimizer_states", "total")


@dataclass(frozen=True)
class Comparison:
    """One stage on one number of ranks; bytes per rank, sent ones per step.

    held_bytes, sent_bytes   {"predicted": …, "measured": …}; measured is rank 0's, and `equal`
                             says that every rank's equals the prediction, nothing left over
    wire_bytes               an average rank's share of the loopback traffic of a step, or None
                             for the reason in `wire_reason`
    peak_bytes               the largest sum of live tensors inside a step, on any rank, and what
                             it was made of in `peak_by_kind`
    bitwise                  weights and working parameters have the bits of one process
    """

    stage: int
    ranks: int
    recipe: str
    steps: int
    params: int
    padding: int
    held_bytes: dict[str, dict[str, int]]
    sent_bytes: dict[str, dict[str, int]]
    control_bytes: int
    wire_bytes: int | None
    wire_reason: str | None
    peak_bytes: int
    peak_by_kind: dict[str, int]
    losses: list[float]
    equal: bool
    same_weights_as_one_process: bool
    bitwise: bool

    @property
    def agrees(self) -> bool:
        """All that must agree does."""
        return self.equal and self.same_weights_as_one_process and self.bitwise

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain numbers and strings, for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Derived, counted, and whether they are the same: what every run must repeat."""
        lines = [
            (
                f"stage {self.stage} on {self.ranks} ranks, {self.params:,} parameters "
                f"(+ {self.padding} padding), recipe {self.recipe}"
            ),
            "",
            *derived_and_counted("bytes per rank", held_and_sent(self.held_bytes, self.sent_bytes)),
        ]
        return "\n".join(
            [
                *lines,
                "",
                f"derived equals counted on every rank: {_yes(self.equal)}",
                (
                    f"weights after {self.steps} steps are those of one process, bit for bit: "
                    f"{_yes(self.bitwise)}"
                ),
            ]
        )

    def as_text(self) -> str:
        """The table, and what differs a little from run to run and from system to system."""
        half = precision_of(self.recipe).working == torch.float16
        scaled = "\nthe loss is not scaled here; zerolab train does that" if half else ""
        return (
            f"{self.table()}\n"
            f"peak inside a step, activations included: {self.peak_bytes:,} bytes\n"
            f"{on_the_wire(self.wire_bytes, self.wire_reason)}{scaled}"
        )


def measure(
    stage: int,
    ranks: int,
    recipe: str = "adamw-mixed",
    steps: int = 10,
    world: World | None = None,
    device_memory: float | str | None = None,
    **more: Any,
) -> Comparison:
    """Trains the small GPT on real ranks and holds what they did against what is derived.

    Starts a world of its own unless one of that size is given; `more` are further fields of
    `zerolab.practice.measure.Job`, such as micro_batches. ValueError, in one sentence, for a
    stage, a recipe or a number of ranks or steps that cannot be run. With `device_memory` the
    world that it starts has toy devices; RankError then says what would help if they are full.
    """
    if stage not in STAGES:
        raise ValueError(f"Stage {stage} cannot be measured: choose one of {_list(STAGES)}.")
    precision_of(recipe)
    if steps < 1:
        raise ValueError(f"{steps} steps show nothing: train for at least 1.")
    job = Job(stage, recipe, steps=steps, **more)
    _refuse_nonsense(job)
    if world is None:
        toy: dict[str, Any] = {} if device_memory is None else {"device_memory": device_memory}
        with World(ranks, LIMIT_S, **toy) as own_world:
            return _compare(job, own_world, bool(toy))
    return _compare(job, world)


def _refuse_nonsense(job: Job) -> None:
    if job.micro_batches < 1:
        raise ValueError(f"{job.micro_batches} micro-batches show nothing: take at least 1.")
    if job.max_norm is not None and not job.max_norm > 0:
        raise ValueError(
            f"A largest norm of {job.max_norm:g} leaves no gradient: give one above 0."
        )
    for option, first in (("overlap", 2), ("prefetch", 3)):
        if job.engine.get(option) and job.stage < first:
            raise ValueError(f"Stage {job.stage} has no {option}: it begins with stage {first}.")


def _compare(job: Job, world: World, on_toy_device: bool = False) -> Comparison:
    ranks = world.size
    try:
        counts: list[Count] = world.run(count, job)
    except RankError as error:
        params = num_parameters(job.build(job.model))
        recipe = precision_of(job.recipe).bytes_of
        advice = what_would_help(error, job.stage, ranks, params, recipe)
        if not advice:
            raise
        raise RankError(f"{error}. {advice}", error.rank, error.where) from None
    # one process needs more room than a toy device has
    with World(1, LIMIT_S) if on_toy_device else nullcontext(world) as whole:
        weights, digest = whole.run(train_in_one_process, job, ranks, ranks=[0])[0]
    first = counts[0]
    held, sent = _predicted(job, ranks, first)
    top = max(counts, key=lambda c: c.peak)
    total_wire, reason = _wire(counts, world)
    return Comparison(
        stage=job.stage,
        ranks=ranks,
        recipe=job.recipe,
        steps=job.steps,
        params=first.params,
        padding=first.padding,
        held_bytes={"predicted": held, "measured": _model_states(first)},
        sent_bytes={
            "predicted": sent,
            "measured": {name: first.sent.get(name, 0) for name in sent},
        },
        control_bytes=first.sent["control"],
        wire_bytes=None if total_wire is None else round(total_wire / ranks),
        wire_reason=reason,
        peak_bytes=top.peak,
        peak_by_kind=top.peak_kinds,
        losses=[sum(losses) / ranks for losses in zip(*(c.losses for c in counts), strict=True)],
        equal=all(_equal(c, held, sent) for c in counts),
        same_weights_as_one_process=all(torch.allclose(c.weights, weights) for c in counts),
        bitwise=all(torch.equal(c.weights, weights) and c.digest == digest for c in counts),
    )


def _predicted(job: Job, ranks: int, c: Count) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes held and sent, from the sizes of the units.

    Frozen parameters have no gradients and no optimizer states. Stage 3 gathers them for forward
    and for backward as it does the others, but for forward alone where backward never comes.
    """
    recipe = precision_of(job.recipe).bytes_of
    held = held_bytes(job.stage, ranks, sum(c.units), recipe, c.units)
    sent = sent_bytes(job.stage, ranks, sum(c.units), recipe, c.units, job.micro_batches)
    for sizes, passes in ((c.frozen, 2), (c.ahead, 1)):
        if job.stage == 3 and any(sizes):
            both = sent_bytes(3, ranks, sum(sizes), recipe, sizes, job.micro_batches)
            sent["all_gather"] += both["all_gather"] * passes // 2
        if any(sizes):
            more = held_bytes(job.stage, ranks, sum(sizes), recipe, sizes)
            held["parameters"] += more["parameters"]
    for made in (held, sent):
        made["total"] = sum(size for name, size in made.items() if name != "total")
    return held, sent


def _model_states(c: Count) -> dict[str, int]:
    states = {kind: c.held[kind] for kind in KINDS if kind != "total"}
    return states | {"total": sum(states.values())}


def _equal(c: Count, held: dict[str, int], sent: dict[str, int]) -> bool:
    """This rank's bytes are the predicted ones, and it holds and sends nothing besides."""
    nothing_else = c.held["total"] == held["total"] and c.sent["total"] == sent["total"]
    same_sent = all(c.sent.get(name, 0) == expected for name, expected in sent.items())
    return _model_states(c) == held and same_sent and nothing_else


def _wire(counts: list[Count], world: World) -> tuple[float | None, str | None]:
    if counts[0].wire is None:
        return None, "this system has no loopback counter"
    if not world.private_ports:
        return None, "the ranks share the loopback with the rest of the machine"
    return counts[0].wire, None


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _list(values: Any) -> str:
    return ", ".join(str(value) for value in values)
