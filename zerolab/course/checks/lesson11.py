"""Lesson 11: pitfalls. Diagnoses from charts of live ranks, and two repairs."""

from __future__ import annotations

import difflib
import math
from typing import Any

import torch

from zerolab.course.checks.core import Wrong, exercise, type_of
from zerolab.course.checks.numbers import Slip, expect_number
from zerolab.course.checks.on_ranks import RANKS, on_ranks
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
    given = answer() if callable(answer) else answer
    if not isinstance(given, dict):
        raise Wrong(f"You returned {type_of(given)}.",
                    f'Return a dict such as {{{numbers[0]}: "{next(iter(FAULTS))}"}}.')  # fmt: skip
    missing = [n for n in numbers if n not in given]
    if missing:
        raise Wrong(f"Patient {missing[0]} has no diagnosis.", "Name a fault of the list for each.")
    for n in numbers:
        if given[n] not in FAULTS:
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
    for max_norm in (1.0, 100.0):
        norm = math.sqrt(sum(x * x for s, n in zip(SHARDS, REAL, strict=True) for x in s[:n]))
        right = min(1.0, max_norm / (norm / RANKS)) / RANKS
        factors = on_ranks(_factor_trial, answer, max_norm)
        for rank, got in enumerate(factors):
            if not isinstance(got, float):
                raise Wrong(f"Rank {rank} returns {type_of(got)}.", "Return a number.")
            if not math.isclose(got, right, rel_tol=1e-4):
                raise Wrong(
                    f"max_norm {max_norm:g}: the factor of rank {rank} is {got:.4g} and must be "
                    f"{right:.4g}.",
                    _why_factor(factors, max_norm, norm),
                )


def _factor_trial(answer: Any, max_norm: float) -> Any:
    """Runs on a rank."""
    comm = Comm()
    got = answer(torch.tensor(SHARDS[comm.rank]), REAL[comm.rank], max_norm, comm)
    return float(got) if isinstance(got, (int, float, torch.Tensor)) else got


def _why_factor(factors: list[Any], max_norm: float, norm: float) -> str:
    def factor(of_sum: float) -> float:
        return min(1.0, max_norm / (of_sum / RANKS)) / RANKS

    if max(factors) - min(factors) > 1e-6:
        return "The ranks disagree: each has clipped by the norm of its own shard."
    got, leaked = factors[0], math.sqrt(norm**2 + 1000.0**2)
    known = [
        (factor(leaked), "The end of the last shard is padding, with leftovers in it: `real`."),
        (factor(5 + 12 + 84 + 132), "Norms were added up; squares can be, norms cannot."),
        (factor(132), "That is the largest of the local norms."),
        (factor(norm**2), "The root is missing: that clips by the sum of squares."),
        (min(1.0, max_norm / norm) / RANKS, "That clips by the norm of the sum: clip the mean's."),
        (min(1.0, max_norm / (norm / RANKS)), "The 1/N is missing: the update takes the mean."),
        (max_norm / norm, "Where nothing is to be clipped it is 1/N: no gradient is blown up."),
        (1 / RANKS, "That is the mean, unclipped."),
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
    for counts in ([3, 5, 4, 2], [4, 4, 4, 4], [2, 7, 9, 8], [9, 0, 3, 3]):
        got = on_ranks(_count_trial, answer, counts)
        for rank, number in enumerate(got):
            if isinstance(number, bool) or not isinstance(number, int):
                raise Wrong(f"Rank {rank} returns {type_of(number)}.", "Return an int.")
        if got == [min(counts)] * RANKS:
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
        elif got[0] in (sum(counts), sum(counts) // RANKS):
            words = "Sum or mean: some rank has fewer than the mean."
        elif got[0] < min(counts):
            words = "That is safe, but batches that all ranks have are thrown away."
        raise Wrong(f"With {counts} batches on ranks 0 to 3 the ranks return {got}.", words)


def _count_trial(answer: Any, counts: list[int]) -> Any:
    """Runs on a rank."""
    comm = Comm()
    return answer(counts[comm.rank], comm)


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
        Slip(2.5, "The middle of what the lecture says; with two resources it is 2 at most."),
    ]
    expect_number(answer, 1.5, "Serial over overlapped, 30 ms and 60 ms", slips)
