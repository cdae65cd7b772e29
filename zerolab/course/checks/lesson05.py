"""Lesson 05: stage 1. Own a slice, and hold the states of that slice alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise, type_of
from zerolab.course.checks.functions import ARITHMETIC, without
from zerolab.course.checks.lesson04 import expect_own_memory, made_and_held
from zerolab.course.checks.numbers import Slip, expect_bytes
from zerolab.course.checks.on_ranks import beside
from zerolab.practice.meter import young_garbage
from zerolab.practice.sharding import shard_numel, shard_of, shard_range

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
    expect_bytes(answer, 7, "Rank 0 of four, for each parameter", slips, per_parameter=True)


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
    answer = without(answer, *ARITHMETIC)
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
        words = "Return two ints: (start, stop), the same twice where a rank owns nothing."
        raise Wrong(f"You returned {got!r}.", words) from None
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
    if slices == [(start, stop - start) for start, stop in right]:
        return "Your second number is how many a rank owns: give the end, as a range has it."
    if any(start < 0 for start, _ in slices):
        return "No element lies before 0: ranks count from 0, and rank 0 owns the first ones."
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
@young_garbage()  # once for all ranks: who looks again inside finds little to set aside
def own_states(answer: Any) -> None:
    length = 1001
    for world_size, rank in [(n, rank) for n in (4, 3) for rank in range(n)]:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(world_size * length, generator=generator)
        mine = shard_of(start, world_size, rank)
        states, held = beside(made_and_held, answer, start, world_size, rank)
        _three_shards(states, mine, start, rank)
        expect_own_memory(dict(zip(("master", "momentum", "variance"), states, strict=True)))
        if held > 12 * length:
            raise Wrong(
                f"Rank {rank} keeps {held:,} bytes alive; its states are {12 * length:,}.",
                "A view keeps the whole tensor behind it alive. Own a copy: .float() makes none.",
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
        size = len(whole) // len(mine)
        other = [r for r in range(size) if torch.equal(states[0], shard_of(whole, size, r))]
        raise Wrong(
            f"The master weights of rank {rank} are not its slice of the weights.",
            f"They are the slice of rank {other[0]}." if other else "They start from the weights.",
        )
    if states[1].any() or states[2].any():
        raise Wrong("The moments do not start from zero.", "No gradient has been seen yet.")


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
