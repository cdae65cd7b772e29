"""Lesson 11: pitfalls. Diagnoses from charts of live ranks, and two repairs."""

from __future__ import annotations

import difflib
import math
import operator
import secrets
from typing import Any

import torch

from zerolab.course.checks.core import Wrong, exercise, given_back, type_of
from zerolab.course.checks.functions import expect_callable
from zerolab.course.checks.numbers import Slip, expect_number
from zerolab.course.checks.on_ranks import on_four_and_three, on_ranks
from zerolab.course.faults import FAULTS, NORMAL, PATIENTS
from zerolab.practice.comm import Comm

LOOK = [
    (
        "First: does it end, and if not, who waits where for whom? Then: are the weights the same "
        "on all ranks, and are they the healthy ones?"
    ),
    (
        "Wrong weights on all ranks alike: compare the norm, then the factor. Right weights: "
        "compare what is held and what is sent."
    ),
]


def _diagnosed(answer: Any, numbers: range) -> None:
    given = given_back(answer)
    if not isinstance(given, dict):
        raise Wrong(f"You returned {type_of(given)}.",
                    f'Return a dict such as {{{numbers[0]}: "{next(iter(FAULTS))}"}}.')  # fmt: skip
    missing = [n for n in numbers if n not in given]
    if missing:
        why = "Name a fault of the list for each; the patients are numbers, as in {1: …}."
        raise Wrong(f"Patient {missing[0]} has no diagnosis.", why)
    for n in numbers:
        if type(given[n]) is not str or given[n] not in FAULTS:
            near = difflib.get_close_matches(str(given[n]), FAULTS, 1, 0.3)
            why = f'Did you mean "{near[0]}"?' if near else "Copy a name from the list."
            raise Wrong(f"Patient {n}: {given[n]!r} is not in the list of faults.", why)
    right = [n for n in numbers if given[n] == PATIENTS[n - 1]]
    for n in numbers:
        if n not in right:
            why = _against(given[n], PATIENTS[n - 1])
            why = f"{why} ({len(right)} of {len(numbers)} are right.)"
            raise Wrong(f'Patient {n} is not "{given[n]}".', why, points=len(right))


def _against(guess: str, fault: str) -> str:
    """The most telling symptom that speaks against a wrong diagnosis."""
    for where, healthy in NORMAL.items():
        expected = FAULTS[guess].get(where, healthy)
        found = FAULTS[fault].get(where, healthy)
        if expected != found:
            return f"With that fault {expected}; here {found}."
    raise AssertionError(f"{guess} and {fault} show the same")


@exercise("11.1", "Patients 1 to 4", points=4, hints=LOOK)
def first_four(answer: Any) -> None:
    _diagnosed(answer, range(1, 5))


@exercise("11.2", "Patients 5 to 8", points=4, hints=LOOK)
def second_four(answer: Any) -> None:
    _diagnosed(answer, range(5, 9))


@exercise("11.3", "Patients 9 to 12", points=4, hints=LOOK)
def third_four(answer: Any) -> None:
    _diagnosed(answer, range(9, 13))


# Norms of the real parts: 5, 12, 84 and 132, together 157. The last shard ends in leftovers.
SHARDS = ([3.0, 4.0], [12.0, 0.0], [0.0, 84.0], [132.0, 1000.0])
REAL = (2, 2, 2, 1)


@exercise(
    "11.4",
    "One factor for all ranks",
    points=3,
    hints=[
        "Squares can be added up over ranks; norms cannot.",
        "comm.control_sum(torch.tensor([own_squares])) is the sum over ranks of own_squares.",
        "The mean has 1/N of the sum's norm. Clip only downwards: min(1, max_norm / norm) / N.",
    ],
)
def update_factor(answer: Any) -> None:
    expect_callable(answer)
    on_four_and_three(lambda size: _judge_factor(answer, size))


def _judge_factor(answer: Any, size: int) -> None:
    # On three ranks the first shard is left out. The unit is new each time: no norm is known.
    unit = 1 + secrets.randbelow(999)
    real = [x * unit for s, n in zip(SHARDS[-size:], REAL[-size:], strict=True) for x in s[:n]]
    norm = math.sqrt(sum(x * x for x in real))
    for max_norm in (1.0, 100.0 * unit):
        right = min(1.0, max_norm / (norm / size)) / size
        factors = _factors(answer, max_norm, unit, size)
        for rank, got in enumerate(factors):
            if not isinstance(got, float):
                raise Wrong(f"Rank {rank} returns {got}.", "Return a number.")
            if not math.isclose(got, right, rel_tol=1e-4):
                raise Wrong(
                    f"max_norm {max_norm:g}: the factor of rank {rank} is {got:.4g} and must be "
                    f"{right:.4g}.",
                    _why_factor(factors, max_norm, norm, unit, size),
                )


def _factors(answer: Any, max_norm: float, unit: int, size: int) -> list[Any]:
    try:
        return on_ranks(_factor_trial, answer, max_norm, unit, size=size)
    except Wrong as wrong:
        if "SIGABRT" not in wrong.difference:
            raise
        why = "Have all tensors in a collective the same length? One number of each rank will do."
        raise Wrong(wrong.difference, why) from None


def _factor_trial(answer: Any, max_norm: float, unit: int) -> Any:
    """Runs on a rank: a float, or, where the answer is no number, what it is."""
    comm = Comm()
    place = comm.rank - comm.world_size  # of the last shards
    got = answer(torch.tensor(SHARDS[place]) * unit, REAL[place], max_norm, comm)
    number = hasattr(got, "__float__") and (not isinstance(got, torch.Tensor) or got.numel() == 1)
    return float(got) if number and not isinstance(got, bool) else type_of(got)


def _why_factor(factors: list[Any], max_norm: float, norm: float, unit: int, size: int) -> str:
    def factor(of_sum: float) -> float:
        return min(1.0, max_norm / (of_sum / size)) / size

    if max(factors) - min(factors) > 1e-6:
        return "The ranks disagree: each has clipped by the norm of its own shard."
    got, leaked = factors[0], math.sqrt(norm**2 + (1000.0 * unit) ** 2)
    norms = [5 * unit, 12 * unit, 84 * unit, 132 * unit][-size:]
    known = [
        (factor(leaked), "The end of the last shard is padding, with leftovers in it: `real`."),
        (factor(sum(norms)), "Norms were added up; squares can be, norms cannot."),
        (factor(132 * unit), "That is the largest of the local norms."),
        (factor(norm**2), "The root is missing: that clips by the sum of squares."),
        (factor(norm * size**0.5), "The squares were divided by N, and so the norm by its root."),
        (min(1.0, max_norm / norm) / size,
         "That clips by the norm of the sum, not of the mean, or divides by N twice."),
        (min(1.0, max_norm / (norm / size)), "The 1/N is missing: the update takes the mean."),
        (max_norm / norm, "Where nothing is to be clipped it is 1/N: no gradient is blown up."),
        (1 / size, "That is the mean, unclipped."),
        (norm / size, "That is the norm: return what the gradients are multiplied by."),
    ]  # fmt: skip
    for value, words in known:
        if math.isclose(got, value, rel_tol=1e-4):
            return words
    return "Squares of the real elements, summed over ranks; the root; 1/N for the mean."


@exercise(
    "11.5",
    "As many batches as all ranks have",
    points=3,
    hints=[
        "A rank must know how many the others have: which collective tells everybody everything?",
        "Gather one number from each rank: comm.all_gather(full, shard), full with N elements.",
        "int(full.min()) is the number that every rank can take.",
    ],
)
def common_batches(answer: Any) -> None:
    expect_callable(answer)
    on_four_and_three(lambda size: _judge_batches(answer, size))


def _judge_batches(answer: Any, size: int) -> None:
    anything = [1 + secrets.randbelow(1000) for _ in range(4)]
    for four in ([6, 9, 3, 2], [4, 4, 4, 4], [2, 7, 9, 8], [9, 3, 0, 3], anything):
        counts = four[-size:]
        got = on_ranks(_count_trial, answer, counts, size=size)
        for rank, number in enumerate(got):
            if not isinstance(number, int):
                raise Wrong(f"Rank {rank} returns {number}.", "Return an int: int(…).")
        if got == [min(counts)] * size:
            continue
        words = "Every rank must take the same number, and no rank more than it has."
        if got == counts:
            words = "Each rank returned its own number: who has more waits for who has none left."
        elif len(set(got)) > 1:
            words = "The ranks disagree, so one of them will wait for ever."
        elif got[0] == counts[0]:
            words = "That is what rank 0 has: ask all ranks."
        elif got[0] == max(counts):
            words = "That is what the richest has; the others have none left before it ends."
        elif got[0] in (sum(counts), sum(counts) // size):
            words = "Sum or mean: some rank has fewer than the mean."
        elif got[0] < min(counts):
            words = "That is safe, but batches that all ranks have are thrown away."
        elif got[0] > min(counts):
            words = f"Rank {counts.index(min(counts))} has only {min(counts)}."
        raise Wrong(
            f"With {counts} batches on ranks 0 to {size - 1} the ranks return {got}.", words
        )


def _count_trial(answer: Any, counts: list[int]) -> Any:
    """Runs on a rank: an int, or, where the answer is none, what it is."""
    comm = Comm()
    got = answer(counts[comm.rank], comm)
    try:
        return type_of(got) if isinstance(got, bool) else operator.index(got)
    except TypeError:
        return type_of(got)


@exercise(
    "11.6",
    "What overlap can gain",
    points=1,
    hints=["One after the other: 90 ms. At the same time: as long as the longer of the two."],
)
def overlap_gain(answer: Any) -> None:
    slips = [
        Slip(3, "Overlapped, the step still takes as long as the link: 60 ms, not 30."),
        Slip(2, "2 is the bound; it is reached only where both take equally long."),
        Slip(2 / 3, "That is the overlapped time over the serial one."),
        Slip(0.5, "That is computation over communication."),
        Slip(1, "Overlap hides the shorter of the two: it gains something."),
        Slip(2.5, "The middle of what the lecture says; with two resources it is 2 at most."),
    ]
    expect_number(answer, 1.5, "Serial over overlapped, 30 ms and 60 ms", slips)
