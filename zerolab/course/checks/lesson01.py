"""Lesson 01: what you know already, and a first average over ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise, type_of
from zerolab.course.checks.numbers import Slip, expect_bytes
from zerolab.course.checks.on_ranks import RANKS, apart, on_four_and_three, on_ranks
from zerolab.course.checks.quiz import Question, expect_answers
from zerolab.practice.comm import Comm
from zerolab.practice.meter import Meter

QUESTIONS = (
    Question("bf16 bytes", 2, {
        16: "bf16 has 16 bits, and 8 bits are a byte.",
        4: "4 is fp32: the 16 in bf16 are its bits.",
        1: "1 is an 8-bit number.",
    }, "Divide the 16 bits of its name by 8."),
    Question("all-reduce", 10, {
        2.5: "That is the mean. An all-reduce of torch adds; who wants a mean divides.",
        3: "That is what rank 2 brought: afterwards it has everybody's sum.",
        6: "That is the sum up to rank 2: an all-reduce adds over all ranks.",
        4: "That is the largest, or the number of ranks: here the numbers are added.",
    }, "1 + 2 + 3 + 4 arrives on every rank."),
    Question("reduce-scatter", 3, {
        12: "That is after an all-reduce, where each rank has all sums.",
        48: "That is after an all-gather of all numbers: nothing was added.",
        1: "The sums are cut into as many parts as there are ranks: 12 over 4 ranks.",
        4: "4 is the number of parts: how long is one of them?",
    }, "Twelve sums exist in the end, each on one rank."),
    Question("AdamW", 2, {
        1: "1 is SGD with momentum: AdamW also remembers squared gradients.",
        3: "A copy of the weight in fp32 is the recipe's, not AdamW's: leave it out here.",
        0: "0 is plain SGD, which remembers nothing.",
        8: "8 is their bytes in fp32; how many numbers are that?",
        12: "12 is bytes, with the fp32 copy of the weight; here numbers are asked for.",
    }, "It keeps a running average of the gradient, and one of its square."),
    Question("GB", 1e9, {
        2**30: "That is a GiB. In this course G is ten to the ninth, as in the papers.",
        1e6: "That is a MB.",
        1024: "That is a KiB: write out all of a GB's bytes.",
        1e12: "That is a TB.",
    }, "Kilo, mega, giga: three times a thousand."),
    Question("GiB", 80e9 / 2**30, {
        80e9 * 2**30 / 1e18: "A GiB is larger than a GB, so there are fewer of them: divide.",
        80: "80 GB are not 80 GiB: the two units differ by 7 %.",
        80e9 / 1024**2 / 1000: "You mixed 1024 and 1000: a GiB is 1024 · 1024 · 1024 bytes.",
        78.125: "You divided by 1024 once: a GiB is 1024³ bytes, a GB 1000³.",
    }, "Divide 80e9 by 2**30."),
    Question("averages", ("gradients", "gradient", "grads", "grad"), {
        "weights": "The weights need no average: equal steps keep them equal. (Averaging weights "
                   "is local SGD.)",
        "parameters": "The parameters need no average: equal steps keep them equal.",
        "loss": "A loss is printed; what the step needs is its gradients.",
        "batches": "Each rank keeps its own batch: that is the data that is parallel.",
        "activations": "Activations belong to a rank's own batch and never leave it.",
        "optimizer states": "They follow from gradients: equal gradients keep them equal.",
    }, "What differs from rank to rank after backward, and must not differ in the step?"),
    Question("differs", ("batch", "batches", "data", "mini-batch", "micro-batch",
                         "input", "input data", "training data", "sample", "example",
                         "training example", "token"), {
        "parameters": "The parameters are the same on every rank: that is what ZeRO will change.",
        "optimizer states": "They are the same on every rank: that is what ZeRO will change.",
        "gradients": "Not after they have been averaged.",
        "nothing": "Then all ranks would do the same work.",
        "activations": "They differ because something else did before them.",
        "loss": "It differs because something else did before it.",
    }, "What is parallel in data parallelism?"),
)  # fmt: skip


@exercise(
    "01.1",
    "What you know already",
    points=len(QUESTIONS),
    hints=[
        "bf16 bytes: 8 bits are a byte.",
        "all-reduce: everybody's numbers are added up, and everybody gets the result.",
        "reduce-scatter: the same sums, but each rank gets only its part of them.",
        "AdamW: its two moments are its memory.",
        "GB and GiB: one is 1000³ bytes, the other 1024³; the prefix with an i is the larger.",
        "averages, differs: every rank has the same model and other data.",
    ],
)
def placement(answer: Any) -> None:
    expect_answers(answer, QUESTIONS)


@exercise(
    "01.2",
    "What a rank sends in an all-reduce",
    points=1,
    hints=[
        (
            "Half of an all-reduce: of its four numbers a rank keeps one to add up, and sends the "
            "other three to their owners."
        ),
        "The other half: it hands its finished sum to the three others. 3 + 3 numbers of 4 bytes.",
    ],
)
def predict(answer: Any) -> None:
    slips = [
        Slip(16, "That is its own four numbers once: they are summed, and handed round."),
        Slip(32, "That is the large-N form, twice all its bytes: a rank's own part never travels."),
        Slip(12, "That is one of the two halves: reduce-scatter or all-gather."),
        Slip(48, "That is everything to everybody, which needs no parts and costs twice as much."),
        Slip(6, "6 is numbers; each has 4 bytes."),
        Slip(96, "That is all four ranks together: give one rank's bytes."),
        Slip(64, "That is what all four ranks hold: how much of it does one send?"),
    ]
    expect_bytes(answer, 24, "One rank of four, four fp32 numbers", slips)


@exercise(
    "01.3",
    "An average over ranks",
    points=3,
    hints=[
        "An all-reduce leaves the sum, on every rank. One thing is missing to a mean.",
        "comm.all_reduce(tensor) writes into the tensor that it is given: give it a copy.",
        "total = values.clone(); comm.all_reduce(total); then divide by comm.world_size.",
    ],
)
def mean_over_ranks(answer: Any) -> None:
    seed = random.randrange(2**31)  # numbers that nobody can have prepared
    keys = apart(_keys, seed)
    on_four_and_three(lambda size: _judge_mean(answer, seed, keys[size]))


def _judge_mean(answer: Any, seed: int, key: Key) -> None:
    size = len(key.values)
    for rank, seen in enumerate(on_ranks(_trial, answer, seed, size=size)):
        if type(seen.got) is not Tensor:
            raise Wrong(f"Rank {rank} returned {type_of(seen.got)}.", "Return a tensor, on all.")
        if seen.got.shape != key.mean.shape:
            raise Wrong(
                f"Rank {rank} returned shape {tuple(seen.got.shape)} for values of shape "
                f"{tuple(key.mean.shape)}.",
                "The average is over ranks, for each place: there are as many as there are values.",
            )
        if not torch.allclose(seen.got.double(), key.mean.double(), rtol=1e-5):
            raise Wrong(f"Rank {rank} has {_short(seen.got)}; the mean is {_short(key.mean)}.",
                        _why(seen.got.double(), key, rank))  # fmt: skip
        if not torch.equal(seen.values, key.values[rank]):
            raise Wrong(
                f"The mean is right, but the values of rank {rank} are overwritten.",
                "comm.all_reduce writes into the tensor it is given: give it a copy.",
                points=2,
            )
        budget = 2 * (size - 1) * key.mean.nbytes // size
        if seen.sent > budget:
            raise Wrong(
                f"The mean is right, but rank {rank} sends {seen.sent} bytes where one all-reduce "
                f"sends {budget}.",
                "One all-reduce is enough: a second one, or gathering everybody's values to add "
                "them here, sends more.",
                points=2,
            )


@dataclass(frozen=True)
class Seen:
    """What one rank returned, the values that it was given, afterwards, and bytes sent."""

    got: Any
    values: Tensor
    sent: int


@dataclass(frozen=True)
class Key:
    """What the ranks are given, (ranks, 12), and the mean of it, (12,)."""

    values: Tensor
    mean: Tensor


def _trial(answer: Callable[[Tensor, Comm], Tensor], seed: int) -> Seen:
    """Runs on a rank: twelve values that no other rank has."""
    comm = Comm()
    values = _every(comm.world_size, seed)[comm.rank].clone()
    with Meter() as meter:
        got = answer(values, comm)
    sent = meter.sent_bytes()
    return Seen(got, values, sent["total"] + sent["control"])


def _every(ranks: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed + ranks)
    return 0.5 + torch.rand(ranks, 12, generator=draw)  # no mean near 0: there rounding decides


def _keys(seed: int) -> dict[int, Key]:
    """By number of ranks."""
    every = [_every(ranks, seed) for ranks in (RANKS, 3)]
    return {len(values): Key(values, values.double().mean(0).float()) for values in every}


def _short(values: Tensor) -> str:
    return f"[{', '.join(f'{value:.3g}' for value in values.flatten()[:3].tolist())}, …]"


def _why(got: Tensor, key: Key, rank: int) -> str:
    ranks, own = len(key.values), key.values[rank]
    for wrong, words in [
        (key.mean * ranks, "That is the sum: divide by the number of ranks."),
        (key.mean / ranks, "You divided twice, before the sum and after it."),
        (own, "Those are this rank's own values: the sum is in the tensor that was reduced."),
        (own / ranks, "That is this rank's own values, divided: nothing was summed."),
    ]:
        if torch.allclose(got, wrong.double(), rtol=1e-4, atol=1e-6):
            return words
    if bool((got == got.flatten()[0]).all()):
        return "All places are alike: you averaged over places, and not over ranks."
    return "Sum over ranks first, then divide by how many there are."
