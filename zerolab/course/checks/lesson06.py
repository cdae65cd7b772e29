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
from zerolab.course.checks.on_ranks import RANKS, apart, on_four_and_three, on_ranks
from zerolab.practice import data
from zerolab.practice.comm import Comm, sum_in_rank_order
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.meter import Meter
from zerolab.practice.sharding import flatten, padded_numel, shard_of
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
    expect_bytes(answer, 5.5, "Rank 0 of four, for each parameter", slips, per_parameter=True)


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
    keys = apart(_keys)
    on_four_and_three(lambda size: _judge_sending(answer, size, keys[size]))


def _judge_sending(answer: Any, size: int, key: Key) -> None:
    shards = sum(unit.nbytes for unit in key.right) // size
    for rank, seen in enumerate(on_ranks(_trial, answer, size=size)):
        _right_sums(seen.got, key, rank, size)
        budget = 2 * (size - 1) * shards
        if seen.sent["total"] > budget:
            why = "An all-reduce gives every rank every sum: a reduce-scatter sends half as much."
            if seen.sent["reduce_scatter"] == 2 * budget:
                why = "You sent fp32, which is twice the bytes of bf16, or each sum twice in bf16."
            raise Wrong(
                f"The sums are right, but rank {rank} sends {seen.sent['total']:,} bytes where "
                f"{budget:,} suffice.",
                why,
                points=2,
            )
        if seen.held > shards:
            raise Wrong(
                f"The sums are right, but after backward rank {rank} holds {seen.held:,} bytes of "
                f"gradients; its shards are {shards:,}.",
                "full_grads is still there, or grad_shard is a view that keeps it alive: in memory "
                "this is stage 1.",
                points=2,
            )


@dataclass(frozen=True)
class Seen:
    """What one rank shows after two micro-batches; bytes, and its shards by unit."""

    got: list[Any]
    sent: dict[str, int]
    held: int


@dataclass(frozen=True)
class Key:
    """Gradients of two micro-batches by unit, whole and padded: (padded numel,)."""

    right: list[Tensor]  # summed over ranks
    first: list[Tensor]  # the first micro-batch alone, summed over ranks
    own: list[list[Tensor]]  # of each rank, never summed over ranks, fp32


def _keys() -> dict[int, Key]:
    """By number of ranks: what one process gets that takes the ranks' batches in turn."""
    found = {}
    for n in (RANKS, 3):
        model = GPT(SMALL).bfloat16()
        micro_batches = [unit_grads(model, at, n) for at in range(2)]
        first, second = map(sums_of_units, micro_batches)
        right = [a + b for a, b in zip(first, second, strict=True)]
        own = [[a.float() + b.float() for a, b in zip(*both, strict=True)]
               for both in zip(*micro_batches, strict=True)]  # fmt: skip
        found[n] = Key(right, first, own)
    return found


def unit_grads(model: GPT, at: int, ranks: int) -> list[list[Tensor]]:
    """Each rank's gradients of its micro-batch number `at`, by unit, flat and padded for `ranks`.

    The model's gradients must be None before, and are again afterwards.
    """
    found = []
    for rank in range(ranks):
        model.loss(*data.batch(at, rank, ranks)).backward()
        found.append([flat([p.grad for p in unit.parameters()], ranks) for unit in model.units()])
        model.zero_grad(set_to_none=True)
    return found


def flat(tensors: list[Any], ranks: int) -> Tensor:
    """One buffer of a unit's tensors, padded for so many ranks: (padded numel,)."""
    numel = sum(tensor.numel() for tensor in tensors)
    return flatten(tensors, padded_numel(numel, ranks), tensors[0].dtype)


def sums_of_units(by_rank: list[list[Tensor]]) -> list[Tensor]:
    """The sum over ranks of each unit's gradients, rounded once to bf16: (padded numel,)."""
    return [sum_in_rank_order(list(parts)).bfloat16() for parts in zip(*by_rank, strict=True)]


def _trial(send: Callable[[Any, Comm], None]) -> Seen:
    """Runs on a rank: a stage 2 that hands each complete unit to the learner."""
    comm = Comm()
    with Meter() as meter:
        engine = Stage2(GPT(SMALL), comm)
        start = meter.held()["total"]

    def hand_over(unit: Any) -> None:
        engine.reduction.next += 1
        send(unit, comm)
        unit.missing = set(range(len(unit.params)))

    engine.reduction._send = hand_over  # type: ignore[method-assign]
    batches = [data.batch(at, comm.rank, comm.world_size) for at in range(2)]
    held = 0
    with meter:
        for batch in batches:
            engine.backward(engine.model.loss(*batch))  # type: ignore[operator]
            gc.collect()
            held = max(held, meter.held()["total"] - start)
    return Seen(
        got=[unit.grad_shard for unit in engine.units],
        sent=meter.sent_bytes(),
        held=held - sum(tensor.nbytes for batch in batches for tensor in batch),
    )


def _right_sums(shards: list[Any], key: Key, rank: int, size: int) -> None:
    for place, (got, whole) in enumerate(zip(shards, key.right, strict=True)):
        right = shard_of(whole, size, rank)
        where = f"On rank {rank}, grad_shard of unit {place}"
        if type(got) is not Tensor:
            raise Wrong(f"{where} is {got!r}.", "Put the summed shard into unit.grad_shard.")
        if got.shape != right.shape or got.dtype != right.dtype:
            raise Wrong(
                f"{where} is {got.dtype} of shape {tuple(got.shape)}; its shard is "
                f"{right.dtype} of shape {tuple(right.shape)}.",
                "A rank keeps its own shard alone, in the dtype of the gradients.",
            )
        if not torch.equal(got, right):
            different = int((got != right).sum())
            first, own = (
                shard_of(each, size, rank) for each in (key.first[place], key.own[rank][place])
            )
            raise Wrong(
                f"{where} differs in {different} of {len(right)} elements after two micro-batches.",
                _why(got.float(), right.float(), first.float(), own, size),
            )


def _why(got: Tensor, right: Tensor, first: Tensor, own: Tensor, size: int) -> str:
    if torch.equal(got, first):
        return "This is the first micro-batch alone: the second was not added."

    def near(other: Tensor) -> bool:
        return torch.allclose(got, other, rtol=0.05, atol=1e-4)

    if near((right - first).bfloat16().float()):
        return "This is the second micro-batch alone: it has replaced the first."
    if near(own):
        return "These are this rank's own gradients: they were never summed over ranks."
    if near(right / size):
        return "You divided by N here: the step does that, with its scale."
    if near(right + first):
        return "The first micro-batch is in it twice: full_grads was sent and not let go of."
    if near(right):
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
        Slip(10, "That is bytes for one parameter: there are 7e9 of them."),
        Slip(2 * psi, "2Ψ is one pass: four backward passes send gradients, one step parameters."),
    ]
    expect_bytes(answer, 10 * psi, "Stage 2, 7e9 parameters, four micro-batches", slips)


@exercise(
    "06.4",
    "Stage 2 of 13 billion parameters on 8 ranks",
    points=1,
    hints=[
        "Which kind of state does every rank still hold whole? How many bytes are divided by 8?",
        "2 bytes stay whole; 14 bytes are divided by 8.",
    ],
)
def stage2_states(answer: Any) -> None:
    psi = 13e9
    slips = [
        Slip(5.5 * psi, "That is stage 1: the gradients are divided by 8, too."),
        Slip(2 * psi, "That is stage 3, or the parameters alone."),
        Slip(16 * psi, "That is plain data parallelism: nothing is divided yet."),
        Slip(1.75 * psi, "That is what is divided; the whole parameters come on top."),
        Slip(3.75, "That is bytes for one parameter: there are 13e9 of them."),
        Slip(30 * psi, "That is all ranks together: give one rank's bytes."),
        Slip((2 + 10 / 8) * psi, "You forgot the fp32 master copy: K is 12, not 8."),
    ]
    expect_bytes(answer, 3.75 * psi, "Stage 2, 13e9 parameters, 8 ranks", slips)
