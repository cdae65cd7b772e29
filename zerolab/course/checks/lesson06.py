"""Lesson 06: stage 2. What to do with a unit's gradients the moment they are complete."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise
from zerolab.course.checks.numbers import Slip, expect_bytes
from zerolab.course.checks.on_ranks import on_four_and_three, on_ranks
from zerolab.practice import data
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.meter import Meter
from zerolab.practice.stage2 import Stage2

SMALL = GPTConfig(width=20, layers=1, heads=2)


@exercise(
    "06.1",
    "Predict stage 2 on four ranks",
    points=1,
    hints=[
        "Two kinds of state are divided now. Which one is still whole?",
        "2 bytes of parameters stay; 2 + 12 bytes are divided by 4.",
    ],
)
def predict(answer: Any) -> None:
    slips = [
        Slip(7, "7 is stage 1: the gradients are divided now, too."),
        Slip(4, "4 is everything divided by 4: that is stage 3."),
        Slip(3.75, "3.75 is right for eight ranks; here there are four."),
        Slip(3.5, "3.5 is what is divided; the parameters are whole and come on top."),
        Slip(16, "16 is plain data parallelism."),
        Slip(22, "22 is all four ranks together: give one rank's bytes."),
    ]
    expect_bytes(answer, 5.5, "Rank 0 of four, for each parameter", slips)


@exercise(
    "06.2",
    "Send a unit's gradients to their owners",
    points=4,
    hints=[
        "Three things: add up over ranks what this rank owns; keep that; let go of the rest.",
        (
            "The sum needs memory of its own: a view of full_grads would keep all of full_grads "
            "alive. torch.empty(len(unit.full_grads) // comm.world_size, dtype=...) has it."
        ),
        "If unit.grad_shard is there already, an earlier micro-batch made it: add to it.",
        "At the end, unit.full_grads = None frees the whole gradients.",
    ],
)
def send_to_owners(answer: Any) -> None:
    on_four_and_three(lambda size: _judge_sending(answer, size))


def _judge_sending(answer: Any, size: int) -> None:
    for rank, seen in enumerate(on_ranks(_trial, answer, size=size)):
        _right_sums(seen, rank)
        if seen.sent > seen.budget:
            raise Wrong(
                f"The sums are right, but rank {rank} sends {seen.sent:,} bytes where "
                f"{seen.budget:,} suffice.",
                "An all-reduce gives every rank every sum: a reduce-scatter sends half as much.",
                points=2,
            )
        if seen.held > seen.shards:
            raise Wrong(
                f"The sums are right, but after backward rank {rank} holds {seen.held:,} bytes of "
                f"gradients; its shards are {seen.shards:,}.",
                "full_grads is still there, or grad_shard is a view that keeps it alive: in memory "
                "this is stage 1.",
                points=2,
            )


@dataclass(frozen=True)
class Seen:
    """What one rank shows after two micro-batches; bytes, and gradients by unit."""

    got: list[Tensor | None]
    right: list[Tensor]
    first: list[Tensor]  # after the first micro-batch alone
    local: list[Tensor]  # this rank's part of its own gradients of both, never summed
    sent: int
    budget: int
    held: int
    shards: int
    world_size: int


def _trial(send: Callable[[Any, Comm], None]) -> Seen:
    """Runs on a rank: a stage 2 that hands each complete unit to the learner."""
    comm = Comm()
    mine = Stage2(GPT(SMALL), comm)
    with Meter() as meter:
        theirs = Stage2(GPT(SMALL), comm)
        start = meter.held()["total"]
    local = [torch.zeros(u.padded // comm.world_size) for u in reversed(theirs.units)]

    def hand_over(unit: Any) -> None:
        theirs.reduction.next += 1
        place = theirs.reduction.next - 1
        length = unit.padded // comm.world_size
        local[place] += unit.grads()[comm.rank * length :][:length].float()
        send(unit, comm)
        unit.missing = set(range(len(unit.params)))

    theirs.reduction._send = hand_over  # type: ignore[method-assign]
    batches = [data.batch(at, comm.rank, comm.world_size) for at in range(2)]
    held = 0
    with meter:
        for batch in batches:
            theirs.backward(theirs.model.loss(*batch))  # type: ignore[operator]
            gc.collect()
            held = max(held, meter.held()["total"] - start)
    first: list[Tensor] = []
    for batch in batches:
        mine.backward(mine.model.loss(*batch))  # type: ignore[operator]
        first = first or [unit.own_grads().clone() for unit in mine.units]
    right = [unit.own_grads() for unit in mine.units]
    shards = sum(shard.nbytes for shard in right)
    return Seen(
        got=[unit.grad_shard for unit in theirs.units],
        right=right,
        first=first,
        local=local[::-1],
        sent=meter.sent_bytes()["total"],
        budget=2 * (comm.world_size - 1) * shards,
        held=held - sum(t.nbytes for t in (*local, *(t for batch in batches for t in batch))),
        shards=shards,
        world_size=comm.world_size,
    )


def _right_sums(seen: Seen, rank: int) -> None:
    for place, (got, right) in enumerate(zip(seen.got, seen.right, strict=True)):
        where = f"On rank {rank}, grad_shard of unit {place}"
        if not isinstance(got, Tensor):
            raise Wrong(f"{where} is {got!r}.", "Put the summed shard into unit.grad_shard.")
        if got.shape != right.shape or got.dtype != right.dtype:
            raise Wrong(
                f"{where} is {got.dtype} of shape {tuple(got.shape)}; its shard is "
                f"{right.dtype} of shape {tuple(right.shape)}.",
                "A rank keeps its own shard alone, in the dtype of the gradients.",
            )
        if not torch.equal(got, right):
            different = int((got != right).sum())
            raise Wrong(
                f"{where} differs in {different} of {len(right)} elements after two micro-batches.",
                _why(got, seen, place),
            )


def _why(got: Tensor, seen: Seen, place: int) -> str:
    if torch.equal(got, seen.first[place]):
        return "This is the first micro-batch alone: the second was not added."
    difference = (seen.right[place].float() - seen.first[place].float()).to(got.dtype)
    if torch.allclose(got.float(), difference.float(), rtol=0.05, atol=1e-4):
        return "This is the second micro-batch alone: it has replaced the first."
    if torch.allclose(got.float(), seen.local[place], rtol=0.05, atol=1e-4):
        return "These are this rank's own gradients: they were never summed over ranks."
    if torch.allclose(
        got.float(), seen.right[place].float() / seen.world_size, rtol=0.05, atol=1e-4
    ):
        return "You divided by N here: the step does that, with its scale."
    twice = seen.right[place].float() + seen.first[place].float()
    if torch.allclose(got.float(), twice, rtol=0.05, atol=1e-4):
        return "The first micro-batch is in it twice: full_grads was sent and not let go of."
    if torch.allclose(got.float(), seen.right[place].float(), rtol=0.05, atol=1e-4):
        return (
            "That is right up to rounding. Reduce-scatter each micro-batch with comm, in bf16, and "
            "add the result to what is there: the task asks for these bits."
        )
    return "Each micro-batch's gradients are summed over ranks once, and added to what is there."


@exercise(
    "06.3",
    "Four micro-batches at stage 2",
    points=1,
    hints=[
        "How often are the gradients sent in a step, and how often the parameters?",
        "Each of the four backward passes sends 2Ψ bytes; the new parameters are sent once.",
    ],
)
def accumulation(answer: Any) -> None:
    psi = 7e9
    slips = [
        Slip(
            4 * psi, "4Ψ is a step of one micro-batch, or stage 1, which can wait: stage 2 can't."
        ),
        Slip(16 * psi, "16Ψ sends the parameters four times, too: they change once a step."),
        Slip(5 * psi, "5Ψ counts elements; an element has 2 bytes."),
        Slip(8 * psi, "8Ψ is the gradients alone: new parameters are gathered once on top."),
        Slip(24 * psi, "24Ψ is stage 3, which gathers parameters twice for each micro-batch."),
        Slip(2 * psi, "2Ψ is one pass: four backward passes send gradients, one step parameters."),
    ]
    expect_bytes(answer, 10 * psi, "Stage 2, 7e9 parameters, four micro-batches", slips)


@exercise(
    "06.4",
    "Stage 2 of 13 billion parameters on 8 ranks",
    points=1,
    hints=["2 bytes stay whole; 14 bytes are divided by 8."],
)
def stage2_states(answer: Any) -> None:
    psi = 13e9
    slips = [
        Slip(5.5 * psi, "That is stage 1: the gradients are divided by 8, too."),
        Slip(2 * psi, "That is stage 3, or the parameters alone."),
        Slip(16 * psi, "That is plain data parallelism: nothing is divided yet."),
        Slip(1.75 * psi, "That is what is divided; the whole parameters come on top."),
        Slip(30 * psi, "That is all ranks together: give one rank's bytes."),
        Slip((2 + 10 / 8) * psi, "You forgot the fp32 master copy: K is 12, not 8."),
    ]
    expect_bytes(answer, 3.75 * psi, "Stage 2, 13e9 parameters, 8 ranks", slips)
