"""Lesson 05: stage 1. Own a slice, hold the states of that slice alone, and make the step."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise, type_of
from zerolab.course.checks.numbers import Slip, expect_bytes
from zerolab.course.checks.on_ranks import RANKS, on_ranks
from zerolab.practice import data
from zerolab.practice.comm import Comm, sum_in_rank_order
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.measure import Job, train_in_one_process
from zerolab.practice.meter import Meter
from zerolab.practice.sharding import shard_numel, shard_of, shard_range
from zerolab.practice.stage1 import Stage1
from zerolab.theory.traffic import sent_bytes

SIZES = [(12, 4), (10, 4), (9, 4), (104_333, 3), (2, 4), (1, 1), (5, 8), (57, 2)]


@exercise(
    "05.1",
    "Predict stage 1 on four ranks",
    points=1,
    hints=[
        "Which of the three kinds of state is divided, and by how much?",
        "2 bytes and 2 bytes stay; 12 bytes are divided by 4.",
    ],
)
def predict(answer: Any) -> None:
    slips = [
        Slip(16, "16 is plain data parallelism: something is divided by 4 now."),
        Slip(4, "4 is the part that stays, or 16 with everything divided: that is stage 3."),
        Slip(5.5, "5.5 is eight ranks at stage 1, or four at stage 2: gradients are whole here."),
        Slip(3, "3 is the optimizer states alone; parameters and gradients are there too."),
        Slip(6, "You left out the fp32 master weights: K = 12 includes them."),
        Slip(28, "28 is all four ranks together: give one rank's bytes."),
    ]
    expect_bytes(answer, 7, "Rank 0 of four, for each parameter", slips)


@exercise(
    "05.2",
    "Own your slice",
    points=2,
    hints=[
        (
            "Every rank's shard has the same length, because a collective moves equal parts. Which "
            "length is enough for 10 elements on 4 ranks?"
        ),
        "The length is numel / world_size, rounded up; the last ranks may own less, or nothing.",
        "start = min(rank * length, numel), and stop in the same way with rank + 1.",
    ],
)
def own_slice(answer: Any) -> None:
    for numel, world_size in SIZES:
        for rank in range(world_size):
            got = _range(answer(numel, world_size, rank))
            right = shard_range(numel, world_size, rank)
            if got != right and not (right[0] == right[1] and got[0] == got[1]):
                raise Wrong(
                    f"{numel} elements on {world_size} ranks: rank {rank} owns {right} by the "
                    f"rule of equal shards, and you say {got}.",
                    _why_slice(answer, numel, world_size, rank, got),
                )


def _range(got: Any) -> tuple[int, int]:
    try:
        start, stop = (operator.index(x) for x in got)
    except (TypeError, ValueError):
        raise Wrong(f"You returned {got!r}.", "Return two ints: (start, stop).") from None
    return start, stop


def _why_slice(
    answer: Callable[..., Any], numel: int, world_size: int, rank: int, got: tuple[int, int]
) -> str:
    slices = [_range(answer(numel, world_size, r)) for r in range(world_size)]
    parts = sorted(s for s in slices if s[0] < s[1])
    length = shard_numel(numel, world_size)
    right = [shard_range(numel, world_size, r) for r in range(world_size)]
    if slices == [(start, stop - 1) for start, stop in right]:
        return "Your stop is the last element itself: a Python range ends before its stop."
    if any(start > stop for start, stop in slices):
        return "A start lies beyond its stop: a rank may own nothing, so clip both at numel."
    if max(stop for _, stop in slices) > numel:
        return f"Elements from {numel} on do not exist: that is padding, which nobody owns."
    if any(one[1] > other[0] for one, other in pairwise(parts)):
        return "Some elements are owned by two ranks: both would update them."
    missing = numel - sum(stop - start for start, stop in parts)
    if missing > 0:
        return f"{missing} elements are owned by nobody: they would never be updated."
    if parts[0][1] - parts[0][0] > length:
        return (
            f"Your shards are longer than needed: {numel} / {world_size}, rounded up, is {length}."
        )
    if max(stop - start for start, stop in slices) > length:
        return "The last rank owns all that is left over, more than its shard can hold: round up."
    return (
        f"Every element has one owner, but the parts are not cut at multiples of {length}: shards "
        "must be equally long, with all padding at the end."
    )


@exercise(
    "05.3",
    "Hold the states of your slice alone",
    points=2,
    hints=[
        "Three tensors, each as long as the shard. Which of them starts from the weights?",
        "shard_of(weights, world_size, rank) is a view: it keeps all of the weights alive.",
        "Take shard_of(...).clone() as the master weights, and zeros_like of it for the moments.",
    ],
)
def own_states(answer: Any) -> None:
    world_size, length = 4, 1001
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(world_size * length, generator=generator)
        mine = shard_of(start, world_size, rank)
        given = [start.clone()]
        with Meter() as meter:
            states = answer(given.pop(), world_size, rank)
            gc.collect()
            held = meter.held()["total"]
        _three_shards(states, mine, start, rank)
        if held > 12 * length:
            raise Wrong(
                f"Rank {rank} keeps {held:,} bytes alive; its states are {12 * length:,}.",
                "A view keeps the whole tensor behind it alive. What you own must be a copy.",
            )
        if held < 12 * length:
            raise Wrong(
                f"Rank {rank} holds {held:,} bytes; three fp32 shards are {12 * length:,}.",
                "Two of the three share their memory: an update of one would change the other.",
            )


def _three_shards(states: Any, mine: Tensor, whole: Tensor, rank: int) -> None:
    if not (isinstance(states, tuple) and len(states) == 3):
        raise Wrong(f"Your function returned {type_of(states)}.",
                    "Return a tuple of three tensors: (master, momentum, variance).")  # fmt: skip
    for name, piece in zip(("master", "momentum", "variance"), states, strict=True):
        if not isinstance(piece, Tensor):
            raise Wrong(f"{name} is {type_of(piece)}, not a tensor.")
        if piece.numel() == whole.numel():
            raise Wrong(
                f"{name} has all {whole.numel()} elements on rank {rank}.",
                "That is plain data parallelism: in stage 1 a rank keeps its own shard alone.",
            )
        if piece.shape != mine.shape:
            raise Wrong(f"{name} has shape {tuple(piece.shape)}, the shard {tuple(mine.shape)}.")
        if piece.dtype != torch.float32:
            raise Wrong(f"{name} is {piece.dtype}.", "All three states are fp32: K = 4 + 4 + 4.")
    if not torch.equal(states[0], mine):
        other = [r for r in range(4) if torch.equal(states[0], shard_of(whole, 4, r))]
        raise Wrong(
            f"The master weights of rank {rank} are not its slice of the weights.",
            f"They are the slice of rank {other[0]}." if other else "They start from the weights.",
        )
    if states[1].any() or states[2].any():
        raise Wrong("The moments do not start from zero.", "No gradient has been seen yet.")


@exercise(
    "05.4",
    "The step of stage 1",
    points=4,
    hints=[
        (
            "Three phases: the summed gradients of your slice; the update of your slice; then "
            "everybody's new slices."
        ),
        "The first is a reduce-scatter, the last an all-gather. Both exist on comm.",
        (
            "comm.reduce_scatter(own.grad_shard, own.full_grads); own.adamw.update(own.grad_shard, "
            "scale=1 / comm.world_size)"
        ),
        "Then own.param_shard.copy_(own.adamw.master), and gather param_shard into full_params.",
    ],
)
def stage1_step(answer: Any) -> None:
    for steps in (1, 3):
        job = Job(stage=1, model=GPTConfig(width=20, layers=1, heads=2), steps=steps)
        trial = on_ranks(_trial, answer, job)
        _same_weights(trial, on_ranks(_expected, job, ranks=[0])[0], steps)
    psi = trial[0].params
    budget = sent_bytes(1, RANKS, psi)
    for rank, seen in enumerate(trial):
        if seen.sent["total"] > budget["total"]:
            per_element = seen.sent["total"] * RANKS / (RANKS - 1) / (seen.params + seen.padding)
            raise Wrong(
                f"The weights are right, but rank {rank} sends {seen.sent['total']:,} bytes a step "
                f"({per_element:.3g}Ψ·(N-1)/N) where {budget['total']:,} (4Ψ·(N-1)/N) suffice.",
                _why_traffic(seen.sent),
                points=2,
            )
        if seen.left_over:
            raise Wrong(
                f"The weights are right, but rank {rank} still holds {seen.left_over:,} bytes more "
                "after the step than before it.",
                "A tensor that you made in the step is still referenced somewhere.",
                points=2,
            )
        if seen.temporary > 12 * psi:
            raise Wrong(
                f"Inside the step rank {rank} needs {seen.temporary:,} bytes more than its states.",
                "Something as large as whole fp32 states was made on the way: stay in your slice.",
                points=3,
            )


@dataclass(frozen=True)
class Seen:
    """What one rank shows after a few steps of a learner's function; bytes."""

    params: int
    padding: int
    full_params: Tensor  # (padded,) the working parameters
    master: Tensor  # (shard,) this rank's master weights
    sent: dict[str, int]  # in the last step
    rebound: bool  # full_params was replaced by another tensor
    left_over: int  # held after the last step, beyond what was held before the first
    temporary: int  # peak inside the last step, beyond what was held before it


def _trial(step: Callable[[Any, Comm], None], job: Job) -> Seen:
    """Runs on a rank: a stage 1 whose step is the learner's, and which cannot do its own."""
    comm = Comm()
    model = GPT(job.model)
    params = num_parameters(model)
    with Meter() as meter, mock.patch.object(Stage1, "step", _refuse):
        engine = Stage1(model, comm)
        unit = engine.units[0]
        start = meter.held()["total"]
        for at in range(job.steps):
            engine.backward(model.loss(*data.batch(at, comm.rank, comm.world_size)))
            own = SimpleNamespace(
                full_params=unit.full_params,
                full_grads=unit.grads(),
                param_shard=unit.param_shard,
                grad_shard=shard_of(unit.grads(), comm.world_size, comm.rank),
                adamw=unit.adamw,
            )
            before = meter.held()["total"]
            meter.reset_peak()
            meter.sent.clear()
            with torch.no_grad():
                step(own, comm)
            sent, rebound = meter.sent_bytes(), own.full_params is not unit.full_params
            unit.drop_grads()
            own.full_grads = own.grad_shard = None
        after = meter.held()["total"]
    assert unit.adamw is not None
    return Seen(
        params=params,
        padding=unit.padded - params,
        full_params=unit.full_params,
        master=unit.adamw.master,
        sent=sent,
        rebound=rebound,
        left_over=after - start,
        temporary=meter.peak - before,
    )


def _refuse(*_: Any) -> None:
    raise RuntimeError("this is the package's own step: write it yourself")


@dataclass(frozen=True)
class Expected:
    """Working parameters (padded,) after some steps: the right ones, and after known mistakes."""

    right: Tensor
    start: Tensor
    not_averaged: Tensor
    not_reduced: Tensor


def _expected(job: Job) -> Expected:
    """What one process gets that takes the ranks' batches in turn (run on a rank: one thread)."""

    def alone(
        steps: int,
        combine: Callable[[list[Tensor]], Tensor] = sum_in_rank_order,
        scale: float | None = None,
    ) -> Tensor:
        weights, _ = train_in_one_process(replace(job, steps=steps), RANKS, combine, scale)
        return F.pad(weights, (0, -len(weights) % RANKS)).bfloat16()

    return Expected(
        right=alone(job.steps),
        start=alone(0),
        not_averaged=alone(job.steps, scale=1.0),
        not_reduced=alone(job.steps, combine=_own_slices),
    )


def _own_slices(grads: list[Tensor]) -> Tensor:
    """Each rank's slice of its own gradients, never summed: (Ψ,)."""
    ranges = [shard_range(len(grads[0]), len(grads), rank) for rank in range(len(grads))]
    return torch.cat([grad[a:b] for grad, (a, b) in zip(grads, ranges, strict=True)])


def _same_weights(trial: list[Seen], expected: Expected, steps: int) -> None:
    for rank, seen in enumerate(trial):
        if seen.rebound:
            raise Wrong(
                "own.full_params is another tensor now: the model still has the old one.",
                "Write into the tensors that you are given, for example with copy_.",
            )
        if torch.equal(seen.full_params, expected.right):
            continue
        different = (seen.full_params != expected.right)[: seen.params].nonzero().flatten()
        raise Wrong(
            f"After {steps} step{'s' if steps > 1 else ''} the parameters of rank {rank} differ "
            f"from one process in {len(different):,} of {seen.params:,} elements, first in "
            f"element {int(different[0]) if len(different) else 'of the padding'}.",
            _why_weights(seen, expected, rank),
        )


def _why_weights(seen: Seen, expected: Expected, rank: int) -> str:
    mine = shard_of(seen.full_params, RANKS, rank)
    if torch.equal(seen.full_params, expected.start):
        if torch.equal(seen.master.to(mine.dtype), mine):
            return "Nothing was updated at all: own.adamw.update was never reached."
        return "The master weights moved, the parameters did not: copy the one into the other."
    if torch.equal(seen.full_params, expected.not_averaged):
        return (
            "These are the weights for the sum of the gradients: you forgot the 1/N that makes it "
            "a mean. AdamW all but hides this, because it divides by the gradient's own size."
        )
    if torch.equal(seen.full_params, expected.not_reduced):
        return "Each slice was updated with its owner's gradients alone: they were never summed."
    if torch.equal(mine, shard_of(expected.right, RANKS, rank)):
        return (
            "Your own slice is right and the others' are stale: their owners' updates never "
            "reached you."
        )
    if torch.equal(mine, shard_of(expected.not_averaged, RANKS, rank)):
        return "Your own slice was updated with the sum where a mean is due, and others' are stale."
    if torch.allclose(seen.full_params.float(), expected.right.float(), rtol=0.02, atol=1e-3):
        return (
            "That is right up to rounding. comm adds in rank order, in fp32, and rounds each sum "
            "to bf16 once: the task asks for these bits."
        )
    return "Go through the three phases: which gradients enter the update, and of which slice?"


def _why_traffic(sent: dict[str, int]) -> str:
    if sent["all_reduce"] and sent["all_gather"]:
        return (
            "All-reducing the gradients gives every rank all sums, of which it uses one slice; the "
            "all-gather comes on top: 6Ψ. That is the stage 1 of the lecture's wording, and of "
            "DeepSpeed before March 2020. A reduce-scatter sends half as much."
        )
    if sent["all_gather"] > sent["reduce_scatter"]:
        return "More than the 16-bit parameters is gathered: gather param_shard, once."
    return "Each of the two collectives is needed once."


@exercise(
    "05.5",
    "Stage 1 of 13 billion parameters on 8 ranks",
    points=1,
    hints=[
        "Which kinds of state stay whole, and which is divided by 8?",
        "4 bytes stay whole; 12 bytes are divided by 8.",
    ],
)
def stage1_states(answer: Any) -> None:
    psi, ranks = 13e9, 8
    slips = [
        Slip(16 * psi, "That is plain data parallelism: nothing is divided yet."),
        Slip(16 * psi / ranks, "You divided everything: that is stage 3."),
        Slip((2 + 14 / ranks) * psi, "You divided the gradients too: that is stage 2."),
        Slip(4 + 12 / ranks, "That is bytes for one parameter: there are 13e9 of them."),
        Slip(12 * psi / ranks, "That is the optimizer states alone."),
        Slip((4 + 12 / ranks) * psi * ranks, "That is all ranks together: give one rank's bytes."),
        Slip((4 + 8 / ranks) * psi, "You forgot the fp32 master copy: K is 12, not 8."),
        Slip(4 * psi, "That is the limit for many ranks; with 8 there is 12/8 on top."),
    ]
    expect_bytes(answer, (4 + 12 / ranks) * psi, "Stage 1, 13e9 parameters, 8 ranks", slips)
