"""Lesson 05: the step of stage 1, run on four ranks and on three."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise
from zerolab.course.checks.on_ranks import RANKS, apart, on_four_and_three, on_ranks
from zerolab.practice import data
from zerolab.practice.comm import Comm, sum_in_rank_order
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.measure import Job, train_in_one_process
from zerolab.practice.meter import Meter
from zerolab.practice.sharding import shard_of, shard_range
from zerolab.practice.stage1 import Stage1
from zerolab.theory.traffic import sent_bytes


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
    on_four_and_three(lambda size: _judge(answer, size))


def _judge(answer: Any, size: int) -> None:
    for steps in (1, 3) if size == RANKS else (1,):
        job = Job(stage=1, model=GPTConfig(width=20, layers=1, heads=2), steps=steps)
        trial = on_ranks(_trial, answer, job, size=size)
        _same_weights(trial, apart(_expected, job, size), steps)
    psi = trial[0].params
    budget = sent_bytes(1, size, psi)
    for rank, seen in enumerate(trial):
        if seen.sent["total"] > budget["total"]:
            per_element = seen.sent["total"] * size / (size - 1) / (seen.params + seen.padding)
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
    momentum: Tensor  # (shard,) and their momentum: unlike the update, it shows the scale
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
        momentum=unit.adamw.momentum,
        sent=sent,
        rebound=rebound,
        left_over=after - start,
        temporary=meter.peak - before,
    )


def _refuse(*_: Any) -> None:
    raise RuntimeError("this is the package's own step: write it yourself")


@dataclass(frozen=True)
class Expected:
    """After some steps, each (padded,): the working parameters, right ones and others; momentum."""

    right: Tensor
    start: Tensor
    not_reduced: Tensor
    momentum: Tensor


def _expected(job: Job, world_size: int) -> Expected:
    """What one process gets that takes the ranks' batches in turn."""

    sums: list[Tensor] = []

    def summed(grads: list[Tensor]) -> Tensor:
        sums.append(sum_in_rank_order(grads))
        return sums[-1]

    def padded(whole: Tensor) -> Tensor:
        return F.pad(whole, (0, -len(whole) % world_size))

    def alone(steps: int, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        weights, _ = train_in_one_process(replace(job, steps=steps), world_size, combine)
        return padded(weights).bfloat16()

    right, beta = alone(job.steps, summed), job.options.beta1
    ages = enumerate(reversed(sums))
    momentum = sum((1 - beta) * beta**age * each.float() / world_size for age, each in ages)
    return Expected(
        right=right,
        start=alone(0, summed),
        not_reduced=alone(job.steps, _own_slices),
        momentum=padded(torch.as_tensor(momentum)),
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
            _why_weights(seen, expected, rank, len(trial)),
        )


def _why_weights(seen: Seen, expected: Expected, rank: int, size: int) -> str:
    mine = shard_of(seen.full_params, size, rank)
    if torch.equal(seen.full_params, expected.start):
        if torch.equal(seen.master.to(mine.dtype), mine):
            return "Nothing was updated at all: own.adamw.update was never reached."
        return "The master weights moved, the parameters did not: copy the one into the other."
    if torch.equal(seen.full_params, expected.not_reduced):
        return "Each slice was updated with its owner's gradients alone: they were never summed."
    others = seen.full_params.clone()
    shard_of(others, size, rank).copy_(shard_of(expected.start, size, rank))
    stale = torch.equal(others, expected.start)
    too = " And the others' slices are stale." if stale else ""
    wanted = shard_of(expected.momentum, size, rank)
    times = float(seen.momentum.norm() / wanted.norm())
    if torch.cosine_similarity(seen.momentum, wanted, dim=0) > 0.999 and abs(times - 1) > 0.05:
        if abs(times / size - 1) < 0.05:
            mean = "You updated with the sum of the gradients: you forgot the 1/N that makes a mean"
        else:
            mean = f"The scale is not 1/N: you updated with {times:.3g} times the mean gradient"
        return f"{mean}. AdamW all but hides this, as it divides by the gradient's own size.{too}"
    if stale and torch.equal(mine, shard_of(expected.right, size, rank)):
        return (
            "Your own slice is right and the others' are stale: their owners' updates never "
            "reached you."
        )
    if torch.allclose(seen.full_params.float(), expected.right.float(), rtol=0.02, atol=1e-3):
        return (
            "That is right up to rounding. Sum first, and let scale divide: comm adds in rank "
            "order, in fp32, and rounds each sum to bf16 once. The task asks for these bits."
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
