"""Lesson 13: seven more exercises with numbers, from sizing a job to what disks cost."""

from __future__ import annotations

import math
from typing import Any

from zerolab.course.checks.core import Given, Wrong, exercise, given_back
from zerolab.course.checks.lesson13 import SIZES, expect_parts, number, size
from zerolab.course.checks.numbers import Slip, expect_number, read_number


@exercise(
    "13.6",
    "The fewest ranks",
    points=1,
    hints=[
        "What one rank may hold is its memory less the room. 2Ψ of it is taken at any N.",
        "N must be at least 14Ψ / (memory - room - 2Ψ), rounded up.",
    ],
    params=[20e9, *(half * 5e8 for half in range(26, 56))],
    memory_bytes=[80e9],
    room_bytes=[20e9, 15e9, 22e9],
)
def fewest_ranks(answer: Any, given: Given) -> None:
    psi, free = given.params, given.memory_bytes - given.room_bytes

    def ranks(whole: int, bytes_free: float) -> int:
        left = bytes_free - whole * psi
        return math.ceil((16 - whole) * psi / left) if left > 0 else -1

    right = ranks(2, free)
    value = read_number(given_back(answer))
    if value == right:
        return
    slips = [
        Slip(ranks(2, given.memory_bytes), "The room for everything else is missing."),
        Slip(ranks(0, free), "That is stage 3: at stage 2 the parameters are whole on each rank."),
        Slip(ranks(4, free), "That is stage 1: the gradients are divided, too."),
        Slip(math.ceil(16 * psi / free), "16Ψ over the memory divides everything: stage 3."),
        Slip(right - 1, "One rank fewer does not quite hold it: round up."),
    ]
    for slip in slips:
        if value == slip.value:
            raise Wrong(f"{value:g} ranks is not it.", slip.misconception)
    raise Wrong(f"{value:g} ranks is not it.", "An int: 14Ψ over what 2Ψ leaves free, rounded up.")


@exercise(
    "13.7",
    "What the tool calls 104 GB",
    points=1,
    hints=["Tools count in 2^30 bytes and often write GB. Go to bytes first.", "Divide by 16."],
    shown=[104.3, *(tenths / 10 for tenths in range(211, 990, 13))],
)
def from_a_tool(answer: Any, given: Given) -> None:
    right = given.shown * 2**30 / 16
    slips = [
        Slip(given.shown * 1e9 / 16, "The tool counts GiB, 2^30 bytes, whatever it calls them."),
        Slip(given.shown * 2**30, "That is bytes; a parameter has 16 of them."),
        Slip(given.shown * 2**30 / 12, "12 bytes are the optimizer states alone."),
        Slip(given.shown * 2**30 / 2, "2 bytes are the parameters alone: all states were counted."),
        Slip(given.shown / 16, "In billions of 2^30: give the number of parameters."),
    ]
    expect_number(answer, right, "Parameters", slips)


@exercise(
    "13.8",
    "Traffic of a step with many micro-batches",
    points=2,
    hints=[
        "Which collective is repeated for every micro-batch, at stage 2 and at stage 3?",
        "Stage 2 reduces A times and gathers once; stage 3 does all three A times.",
        "(A + 1) · 2Ψ(N-1)/N and 3A · 2Ψ(N-1)/N bytes.",
    ],
    params=SIZES,
    ranks=[8, 4, 16, 64],
    micro_batches=[8, 4, 16, 32],
)
def many_micro_batches(answer: Any, given: Given) -> None:
    each, n = 2 * given.params * (given.ranks - 1) / given.ranks, given.micro_batches

    def slips(passes: float) -> list[Slip]:
        return [
            Slip(passes * each * given.ranks / (given.ranks - 1), "Times (N-1)/N."),
            Slip(passes * each / 2, "That is elements: each has 2 bytes."),
            Slip(2 * each, "That is one micro-batch at stage 2, or stage 1, which can wait."),
            Slip(3 * each, "That is one micro-batch at stage 3."),
            Slip(2 * n * each, "Updated parameters are gathered once a step, not A times."),
            Slip((2 * n + 1) * each, "Gradients travel in every micro-batch, as both gathers do."),
        ]

    parts = {
        "stage 2": (1.0, size((n + 1) * each, "Stage 2, bytes sent in a step", slips(n + 1))),
        "stage 3": (1.0, size(3 * n * each, "Stage 3, bytes sent in a step", slips(3 * n))),
    }
    expect_parts(answer, parts)


@exercise(
    "13.9",
    "The largest model",
    points=3,
    hints=[
        "Which Ψ makes a stage's formula equal to the memory?",
        "memory / (4 + 12/N), memory / (2 + 14/N), memory · N / 16.",
    ],
    memory_bytes=[32e9, 24e9, 40e9, 48e9, 80e9],
    ranks=[64, 8, 16, 32, 128],
)
def largest_model(answer: Any, given: Given) -> None:
    memory, n = given.memory_bytes, given.ranks
    right = {"stage 1": memory / (4 + 12 / n), "stage 2": memory / (2 + 14 / n),
             "stage 3": memory * n / 16}  # fmt: skip
    parts = {}
    for name, value in right.items():
        slips = [
            Slip(other, f"That is {stage}.") for stage, other in right.items() if stage != name
        ]
        slips += [
            Slip(memory / 16, "That is plain data parallelism."),
            Slip(memory / (4 + 8 / n), "K is 12: the fp32 master weights are among the states."),
            Slip(memory / 4, "That is the limit for many ranks; there are not that many."),
            Slip(memory / 2, "That is the limit for many ranks; there are not that many."),
            Slip(value / 1e9, "That is billions: give the number of parameters."),
        ]
        parts[name] = (1.0, number(value, f"Parameters at {name}", slips))
    expect_parts(answer, parts)


@exercise(
    "13.10",
    "Gradients in fp32",
    points=2,
    hints=[
        "Two bytes more for each gradient. Are gradients divided at stage 1? At stage 2?",
        "Stage 1: 2 + 4 + 12/N. Stage 2: 2 + 16/N.",
    ],
    params=SIZES,
    ranks=[8, 4, 16, 32, 64],
)
def fp32_gradients(answer: Any, given: Given) -> None:
    psi, n = given.params, given.ranks
    one, two = (6 + 12 / n) * psi, (2 + 16 / n) * psi
    known = [
        Slip((4 + 12 / n) * psi, "That is with 16-bit gradients: an fp32 gradient has 4 bytes."),
        Slip((2 + 14 / n) * psi, "That is with 16-bit gradients: an fp32 gradient has 4 bytes."),
        Slip(18 * psi / n, "Everything divided is stage 3."),
        Slip(18 * psi, "That is plain data parallelism."),
        Slip((4 + 16 / n) * psi, "That has the 16-bit gradient besides: Megatron's fp16 recipe."),
    ]
    parts = {
        "stage 1": (1.0, size(one, "Stage 1, each rank", [
            *known, Slip(two, "At stage 1 the gradients are whole: that is stage 2.")])),
        "stage 2": (1.0, size(two, "Stage 2, each rank", [
            *known, Slip(one, "Stage 2 divides the gradients: that is stage 1.")])),
    }  # fmt: skip
    expect_parts(answer, parts)


@exercise(
    "13.11",
    "The batch that hides stage 3",
    points=2,
    hints=[
        "Compute takes 6ΨT / F seconds for T tokens on a rank; communication 6Ψ(N-1)/(N·B).",
        "Set them equal. The size of the model cancels.",
    ],
    flops_per_s=[156e12, 125e12, 400e12, 494e12],
    link_bytes_per_s=[300e9, 25e9, 50e9, 100e9],
    ranks=[8, 16, 64],
)
def hiding_batch(answer: Any, given: Given) -> None:
    share = (given.ranks - 1) / given.ranks
    right = given.flops_per_s / given.link_bytes_per_s * share
    slips = [
        Slip(right / share, "(N-1)/N is missing."),
        Slip(3 * right, "2ΨT FLOPs are forward alone; with backward it is 6ΨT."),
        Slip(right / 2, "3Ψ is elements: 6Ψ bytes are sent."),
        Slip(2 * right, "12Ψ would be three times data parallelism; it is 6Ψ."),
        Slip(right * 2 / 3, "4Ψ is plain data parallelism."),
        Slip(right * given.ranks, "That is all ranks together: give the tokens of one."),
        Slip(1 / right, "Upside down: more FLOPs a second need more tokens to hide behind."),
    ]
    expect_number(answer, right, "Tokens on each rank", slips)


@exercise(
    "13.12",
    "What the disks cost",
    points=2,
    hints=[
        "The optimizer states are 12Ψ bytes. Each step reads them and writes them.",
        "If disk time is a fifth of the step, the compute takes four times as long as the disks.",
        "8Ψ FLOPs a token, with recomputation: tokens = 4 · seconds · FLOPs per second / 8Ψ.",
    ],
    params=[175e9, 70e9, 100e9, 130e9, 200e9],
    disk_bytes_per_s=[25e9, 6.4e9, 12.8e9, 50e9],
    flops_per_s=[1.2e15, 2.4e15, 4e14],
)
def disk_cost(answer: Any, given: Given) -> None:
    seconds = 24 * given.params / given.disk_bytes_per_s
    tokens = 4 * seconds * given.flops_per_s / (8 * given.params)
    parts = {
        "seconds": (1.0, number(seconds, "Seconds at the disks in a step", [
            Slip(seconds / 2, "They are read and written: both ways count."),
            Slip(seconds * 32 / 24, "16Ψ is everything; only the optimizer states are on disk."),
            Slip(seconds * 16 / 24, "K is 12: the master weights are on disk, too."),
        ])),
        "tokens": (1.0, number(tokens, "Tokens in a step", [
            Slip(tokens * 5 / 4, "A fifth of the step: compute is four times the disk time."),
            Slip(tokens / 4, "Then the disks take half of the step, not a fifth."),
            Slip(tokens * 8 / 6, "With recomputation a token costs 8Ψ FLOPs, not 6Ψ."),
            Slip(tokens / 2, "The states are read and written: both ways count."),
        ])),
    }  # fmt: skip
    expect_parts(answer, parts)
