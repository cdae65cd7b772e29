"""Lesson 09: a step whose optimizer is below the device, run on real ranks under the meter."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise
from zerolab.course.checks.functions import expect_callable
from zerolab.course.checks.lesson06 import flat, sums_of_units, unit_grads
from zerolab.course.checks.on_ranks import RANKS, apart, on_four_and_three, on_ranks
from zerolab.practice import data
from zerolab.practice.adamw import AdamW
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.meter import Meter
from zerolab.practice.offload import Offloaded
from zerolab.practice.sharding import shard_of, views
from zerolab.practice.tiers import on_cpu

SMALL = GPTConfig(width=20, layers=1, heads=2)
STEPS = 2


@exercise(
    "09.3",
    "A step below the device",
    points=5,
    hints=[
        (
            "Four moves: the shard of the sums down, the update below, the new parameters up, on "
            "to the other ranks."
        ),
        "down(unit.grad_shard) is a copy in the CPU's memory; then let the device's go: None.",
        (
            "below.update(grads, 1 / comm.world_size) widens the gradients itself, and divides the "
            "sum by the number of ranks."
        ),
        "Convert before you copy: below.master.bfloat16() has half the bytes of below.master.",
        "unit.param_shard.copy_(up(...)) fills this rank's part; comm.all_gather the rest.",
    ],
)
def step_below(answer: Any) -> None:
    expect_callable(answer)
    keys = apart(_keys)
    on_four_and_three(lambda size: _judge_step(answer, size, keys[size]))


@dataclass(frozen=True)
class Seen:
    """What one rank shows; bytes of the last step, and states of all units one after the other."""

    params: list[list[Any]]  # working, of each unit, after each step
    moments: dict[str, Any]  # after the first step
    master: Any  # after the last step
    leftover: int  # on the device after the step, more than parameters
    gradients: int  # of that, gradients
    down: int
    up: int
    sent: int


@dataclass(frozen=True)
class Key:
    """What is right, by unit, whole and padded: (padded numel,)."""

    params: list[list[Tensor]]  # working: before the first step, and after each
    moments: dict[str, list[Tensor]]  # after the first step
    master: list[Tensor]  # after the last step


def _keys() -> dict[int, Key]:
    """By number of ranks: what one process gets that takes the ranks' batches in turn."""
    return {ranks: _key(GPT(SMALL), ranks) for ranks in (RANKS, 3)}


def _key(model: GPT, ranks: int) -> Key:
    units = [list(unit.parameters()) for unit in model.units()]
    adamw = [AdamW(flat([param.data for param in params], ranks)) for params in units]
    working: list[list[Tensor]] = []
    moments: dict[str, list[Tensor]] = {}
    for at in range(STEPS):
        working.append([states.master.bfloat16() for states in adamw])
        for params, whole in zip(units, working[-1], strict=True):
            for param, part in zip(params, views(whole, [p.shape for p in params]), strict=True):
                param.data = part
        sums = sums_of_units(unit_grads(model, at, ranks))
        for states, total in zip(adamw, sums, strict=True):
            states.update(total, 1 / ranks)
        for name in ("momentum", "variance"):
            moments.setdefault(name, [getattr(states, name).clone() for states in adamw])
    working.append([states.master.bfloat16() for states in adamw])
    return Key(working, moments, [states.master for states in adamw])


def _trial(step: Callable[[Any, Any, Comm], None]) -> Seen:
    """Runs on a rank: stage 2 with its optimizer below, of which the learner makes the step."""
    comm = Comm()
    with Meter() as meter:
        with on_cpu():
            model = GPT(SMALL)
        engine = Offloaded(2, model, comm)
        moments: dict[str, Tensor] = {}
        params: list[list[Tensor]] = []
        leftover = 0
        for at in range(STEPS):
            engine.backward(model.loss(*data.batch(at, comm.rank, comm.world_size)))
            gc.collect()
            meter.crossed.clear()
            meter.sent.clear()
            start = meter.held()
            with torch.no_grad():
                for unit in engine.units:
                    step(unit, unit.adamw, comm)
            gc.collect()
            dist.barrier()  # who has skipped a collective would meet the next backward's
            crossed, sent, kept = dict(meter.crossed), meter.sent_bytes(), meter.held()
            gained = kept["total"] - (start["total"] - start["gradients"])
            leftover = max(leftover, gained)
            for name in ("momentum", "variance"):
                moments.setdefault(name, _all(engine, name))
            params.append([unit.full_params.clone() for unit in engine.units])
    seen = Seen(
        params=params,
        moments=moments,
        master=_all(engine, "master"),
        leftover=leftover,
        gradients=kept["gradients"],
        down=crossed.get("down", 0),
        up=crossed.get("up", 0),
        sent=sent["total"],
    )
    engine.close()
    return seen


def _all(engine: Any, state: str) -> Tensor:
    return torch.cat([getattr(unit.adamw, state) for unit in engine.units])


def _judge_step(answer: Any, size: int, key: Key) -> None:
    found = on_ranks(_trial, answer, size=size)
    for rank, seen in enumerate(found):
        _right_bits(seen, key, rank, size)
    shard = sum(params.nbytes for params in key.params[0]) // size
    for rank, seen in enumerate(found):
        _right_edges(seen, shard, rank, size)
        budget = (size - 1) * shard
        if seen.sent > budget:
            raise Wrong(
                f"All bits are right, but rank {rank} sends {seen.sent:,} bytes to the others "
                f"where {budget:,} suffice.",
                "One all-gather of the new parameters: the sums were made in backward already.",
                points=3,
            )
        if seen.leftover > 0:
            raise Wrong(
                f"All bits are right, but after the step rank {rank} holds {seen.leftover:,} bytes "
                "on the device besides its parameters.",
                "Something that came up is kept. A new unit.param_shard? copy_ into the old one.",
                points=3,
            )


def _same(got: Any, right: Tensor) -> bool:
    return type(got) is Tensor and torch.equal(got, right)


def _right_bits(seen: Seen, key: Key, rank: int, size: int) -> None:
    def shards(units: list[Tensor]) -> Tensor:
        return torch.cat([shard_of(whole, size, rank) for whole in units])

    where = f"On rank {rank}"
    names = ("momentum", "variance")
    momentum, variance = (seen.moments[name] for name in names)
    right, right_variance = (shards(key.moments[name]) for name in names)
    if not _same(momentum, right):
        raise Wrong(
            f"{where} the first moments below differ after one step.",
            _why_moments(momentum, right, variance, right_variance, size),
        )
    if seen.gradients:
        raise Wrong(
            f"{where} {seen.gradients:,} bytes of gradients are still on the device afterwards.",
            "Set unit.grad_shard to None once it is below: the next backward would add to it.",
            points=1,
        )
    for step, (params, new) in enumerate(zip(seen.params, key.params[1:], strict=True), 1):
        for place, (got, wanted) in enumerate(zip(params, new, strict=True)):
            if not _same(got, wanted):
                raise Wrong(
                    f"{where} {int((got != wanted).sum())} of {wanted.numel()} parameters of unit "
                    f"{place} differ after {step} step{'s' * (step > 1)}.",
                    _why_params(got, wanted, key.params[0][place], rank, size),
                    points=1,
                )
    if not _same(variance, right_variance) or not _same(seen.master, shards(key.master)):
        raise Wrong(
            f"{where} the states below differ after {STEPS} steps.",
            "One below.update for each unit and step, with that step's gradients.",
        )


def _why_params(got: Tensor, wanted: Tensor, before: Tensor, rank: int, size: int) -> str:
    if torch.equal(got, before):
        return (
            "The moments below are right, and the device still has its first parameters: bring the "
            "new ones up, after the update."
        )
    if torch.equal(shard_of(got, size, rank), shard_of(wanted, size, rank)):
        return "This rank's part is right, the others' are not: all-gather what came up."
    return "The moments below are right; what the device has is not what the weights became."


def _why_moments(
    momentum: Tensor, right: Tensor, variance: Tensor, right_variance: Tensor, n: int
) -> str:
    def near(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).norm() <= 0.02 * b.norm())

    if not momentum.any():
        return "They are still zero: call below.update with the gradients that came down."
    if near(momentum, n * right):
        return "They are N times too large: the sums are divided by N, below.update(…, 1 / N)."
    if near(momentum, n * n * right):
        return "They are N² times too large: you multiplied the sums by N, not by 1 / N."
    if near(momentum, right / n):
        return "They are N times too small: the sums were divided by N twice."
    if near(variance, right_variance) or near(momentum, right):
        return "They are right up to rounding: hand the 16-bit sums over as they came down."
    return "Each update takes this rank's shard of the sums, unit.grad_shard."


def _right_edges(seen: Seen, shard: int, rank: int, n: int) -> None:
    down = {
        0: "put() marks a tensor and moves nothing: down() copies it.",
        2: "The gradients were widened to fp32 before they went down: copy first, convert below.",
        n: "The whole gradients came down on every rank: a rank updates its own shard alone.",
        6: "The states went up and down again: the update goes to where they are, below.",
        7: "The states went up and down again: the update goes to where they are, below.",
    }
    up = {
        0: "put() marks a tensor and moves nothing: up() copies it.",
        2: "The fp32 master weights came up and were converted on the device: convert below, "
        "and half as much crosses.",
        n: "The whole parameters came up on every rank: bring the own shard up, and gather it "
        "over the faster links.",
        6: "All three states came up: the update belongs below, where they are.",
        7: "The states came up, too: they are not needed on the device.",
    }
    for way, got, known in (("down", seen.down, down), ("up", seen.up, up)):
        if got != shard:
            raise Wrong(
                f"All bits are right, but on rank {rank} {got:,} bytes cross {way} in a step; "
                f"{shard:,} are enough.",
                known.get(got // shard, "Two bytes of each element of the shard: no more."),
                points=3,
            )
