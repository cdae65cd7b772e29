"""Lesson 08: what a link's latency and rate decide. The judges' numbers come from the model."""

from __future__ import annotations

import math
import re
from typing import Any

from zerolab.course.checks.core import Wrong, exercise, given_back
from zerolab.course.checks.numbers import Slip, expect_bytes, expect_number
from zerolab.theory.notation import Psi
from zerolab.theory.traffic import ring_time_s, sent


@exercise(
    "08.4",
    "Latency and rate from times",
    points=2,
    hints=[
        "Two sizes suffice: between them only the second term changes.",
        "The slope is (N-1)/N / B seconds per byte. What is left at S = 0 is (N-1) α.",
        "slope = (t2 - t1) / (s2 - s1); B = (N-1) / N / slope; α = (t1 - slope * s1) / (N-1).",
    ],
)
def fit_link(answer: Any) -> None:
    cases = [(4, 50e-6, 100e6, (1e6, 8e6)), (2, 1e-3, 25e9, (1e7, 5e7, 2e9)),
             (8, 2e-5, 3e9, (4e5, 1e6, 3e6, 9e6))]  # fmt: skip
    for n, alpha, rate, sizes in cases:
        times = [float(ring_time_s("all_gather", s, n, rate, alpha)) for s in sizes]
        got = _pair(answer(list(sizes), times, n), "(latency_s, bytes_per_s)")
        slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
        latency_slips = {
            (n - 1) * alpha: "That is what is left at S = 0: the latency of all N-1 rounds.",
            times[0]: "That is the whole time of the smallest: the bytes take a part of it.",
            times[0] / (n - 1): "A round of the smallest also carries bytes: take them away first.",
            rate: "The two are in the other order: (latency_s, bytes_per_s).",
            alpha * 1e6: "That is in microseconds: seconds, please.",
            alpha / 2: "That is an all-reduce: an all-gather waits N-1 times, once a round.",
            alpha * (n - 1) / n: "You divided by N: there are N-1 rounds.",
            alpha * (n - 1) / 3: "You divided by 3, for four ranks: their number is `ranks`.",
        }
        rate_slips = {
            1 / slope: "That is bytes of the full buffer per second; (N-1)/N of them pass a link.",
            slope: "That is seconds per byte.",
            n / (n - 1) / slope: "You multiplied by N/(N-1): less passes than S, not more.",
            sizes[-1] / times[-1]: "S over t counts the latency as if it were bytes.",
            (n - 1) / n * sizes[-1] / times[-1]: "The time of the largest still has α in it.",
            (n - 1) / slope: "A round carries S/N: the slope is (N-1)/N / B.",
            1 / (n * slope): "A round moves S/N, and there are N-1 rounds.",
            rate / 1e9: "That is in GB a second: bytes, please.",
            rate / 1e6: "That is in MB a second: bytes, please.",
        }
        asked = f"{n} ranks, {alpha * 1e6:g} us, {rate / 1e6:g} MB/s"
        _close(got[0], alpha, latency_slips, f"{asked}: the latency is not {got[0]:.3g} s.")
        _close(got[1], rate, rate_slips, f"{asked}: the rate is not {got[1]:.4g} bytes/s.")


def _pair(got: Any, names: str) -> tuple[float, float]:
    try:
        first, second = (float(x) for x in got)
    except (TypeError, ValueError):
        raise Wrong(f"You returned {got!r}.", f"Return two numbers: {names}.") from None
    return first, second


def _close(got: float, right: float, slips: dict[float, str], difference: str) -> None:
    if math.isclose(got, right, rel_tol=1e-3):
        return
    for value, words in slips.items():
        if math.isclose(got, value, rel_tol=1e-3):
            raise Wrong(difference, words)
    raise Wrong(difference, "Write down the time for two sizes, and subtract.")


@exercise(
    "08.5",
    "Where latency ends",
    points=1,
    hints=[
        "Set the two terms equal: (N-1) α = (N-1)/N · S/B. What cancels?",
        "S = N α B.",
    ],
)
def break_even(answer: Any) -> None:
    slips = [
        Slip(1e6, "That is a chunk, αB: the full buffer has eight of them."),
        Slip(8, 'That is the number of MB: give bytes, or write the unit, "… MB".'),
        Slip(7e6, "N-1 stands on both sides and cancels; N does not."),
        Slip(8e6 / 7, "That is one α against all rounds' bytes: there are N-1 rounds of both."),
        Slip(16e6, "An all-reduce has both terms twice: the factor cancels."),
        Slip(56e6, "N-1 stands on both sides and cancels: it is not there once more."),
    ]
    expect_bytes(answer, 8e6, "8 ranks, 10 us, 100 GB/s", slips)


@exercise(
    "08.6",
    "The time of a step of stage 3",
    points=2,
    hints=[
        "How many bytes does a rank send at stage 3, with 16-bit elements, (N-1)/N included?",
        "communication_s = 6 * params * (ranks - 1) / ranks / bytes_per_s",
        "One after the other they take the sum, at the same time at least the longer of the two.",
    ],
)
def step_time(answer: Any) -> None:
    per_parameter = float(sum(sent(3).values()) / Psi)
    for psi, n, rate, compute in [(7e9, 8, 400e9, 0.1), (13e9, 8, 400e9, 0.1), (1e9, 2, 10e9, 0.9),
                                  (7e9, 1, 400e9, 0.1)]:  # fmt: skip
        ring = (n - 1) / n
        link = per_parameter * psi * ring / rate
        right = (compute + link, max(compute, link))
        got = _pair(answer(psi, n, rate, compute), "(serial_s, overlapped_s)")
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(got, right, strict=True)):
            continue
        words = "Bytes first, then seconds, then the sum and the longer of the two."
        wrong_links = {
            12 * psi * ring / rate: "Twice too many bytes: 3 times data parallelism's, or sending "
            "and receiving together. Stage 3 sends 6Ψ(N-1)/N.",
            3 * psi * ring / rate: "That moves 3Ψ bytes: 3Ψ are the elements, each has two bytes.",
            4 * psi * ring / rate: "4Ψ is data parallelism; stage 3 gathers once more, 6Ψ.",
            6 * psi / rate: "(N-1)/N is missing: nobody sends to itself. One rank sends nothing.",
            6 * psi * (n - 1) / rate: "That is all ranks together, each of which has a link of its "
            "own; or bits for bytes.",
            2 * psi * ring / rate: "That is one pass: stage 3 gathers twice and reduces once.",
            8 * psi * ring / rate: "8Ψ has gradients of 32 bits: here all elements have 16.",
            18 * psi * ring / rate: "That is 3 times 6Ψ: 6Ψ already are all three passes.",
            6 * psi * 7 / 8 / rate: "7/8 is (N-1)/N for eight ranks: their number is `ranks`.",
            6 * psi / n / rate: "That is one chunk of each pass: there are N-1 rounds.",
        }
        added = "That is what communication adds: give the whole step, which also computes."
        guesses = [
            ((right[1], right[0]), "The two are in the other order: (serial_s, overlapped_s)."),
            ((right[0], min(compute, link)), "The shorter one cannot be the whole: take max."),
            (
                (right[0], abs(compute - link)),
                "What does not overlap comes on top: take the longer.",
            ),
            ((right[0], right[0] / 2), "Overlap halves the time only where both are equal."),
            ((right[0], max(0, link - compute)), added),
            ((link, max(0, link - compute)), added),
            ((compute / n + link, max(compute / n, link)), "compute_s is each rank's own."),
            ((right[0] * 1e3, right[1] * 1e3), "That is in milliseconds: seconds, please."),
            *(((compute + x, max(compute, x)), why) for x, why in wrong_links.items()),
        ]
        for guess, why in guesses:
            if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(got, guess, strict=True)):
                words = why
                break
        raise Wrong(
            f"{psi / 1e9:g}e9 parameters, {n} rank{'s' if n > 1 else ''}, {rate / 1e9:g} GB/s, "
            f"{compute:g} s: ({got[0]:.4g}, {got[1]:.4g}) is not it.",
            words,
        )


@exercise(
    "08.7",
    "Tokens that hide the communication",
    points=1,
    hints=[
        "Write both times for t tokens and Ψ parameters, and set them equal. What cancels?",
        "With F FLOPs and B bytes a second: 6Ψt / F = 6Ψ(N-1)/N / B, so t = (N-1)/N · F / B.",
    ],
)
def hiding_tokens(answer: Any) -> None:
    right = 7 / 8 * 150e12 / 25e9
    slips = [
        Slip(8 / 7 * right, "(N-1)/N is missing: that would be infinitely many ranks."),
        Slip(2 / 3 * right, "That is data parallelism, 4Ψ; stage 3 sends 6Ψ."),
        Slip(2 * right, "12Ψ is 3 times data parallelism, or sending and receiving together."),
        Slip(right / 2, "3Ψ are elements; a link moves bytes, 6Ψ."),
        Slip(right / 3, "2Ψ is one pass: stage 3 gathers twice and reduces once, 6Ψ."),
        Slip(1.5 * right, "4Ψ FLOPs for a token is backward alone: forward takes 2Ψ more."),
        Slip(3 * right, "2Ψ FLOPs for a token is forward alone: backward takes 4Ψ more."),
        Slip(8 * right, "That is all ranks together: the question is for each."),
        Slip(7e9 * right, "Ψ stands on both sides and cancels."),
    ]  # fmt: skip
    expect_number(answer, right, "Tokens per rank", slips)


@exercise(
    "08.8",
    "Across hosts",
    points=1,
    hints=[
        "Inside a host a rank ends up with 1/G of the gradients. Who else has the same part?",
        "2Ψ(W-G)/(GW) elements with W = 16 and G = 8, and two bytes for each.",
    ],
)
def across_hosts(answer: Any) -> None:
    psi, ranks, group = 13e9, 16, 8
    right = 2 * 2 * psi * (ranks - group) / (group * ranks)
    slips = [
        Slip(right / 2, "That is elements; each has two bytes."),
        Slip(2 * 2 * psi * (ranks - 1) / (group * ranks),
             "That is the formula as printed, with W-1: it also counts what stays in the host."),
        Slip(2 * 3 * psi * (ranks - 1) / ranks, "That is full sharding over all 16 ranks."),
        Slip(2 * 2 * psi * (ranks - 1) / ranks, "That is replication: no part is G times smaller."),
        Slip(right * group, "That is the host's eight ranks together, or the division by G is "
             "missing: a rank owns 1/G of the gradients."),
        Slip(2 * right, "Sending and receiving together, or 1/2 = (W/G - 1)/(W/G) is missing."),
        Slip(1.5 * right, "Gathering parameters stays inside the host: only gradients cross."),
    ]  # fmt: skip
    expect_bytes(answer, right, "13e9 parameters, two hosts of eight", slips)


@exercise(
    "08.9",
    "What a benchmark prints",
    points=1,
    hints=[
        "algbw is S/t. How many bytes does each rank send in that time?",
        "busbw = algbw · 2(N-1)/N for an all-reduce.",
    ],
)
def bus_bandwidth(answer: Any) -> None:
    value = given_back(answer)
    value = re.sub(r"\s*(/|per)\s*s(ec(ond)?)?$", "", value) if isinstance(value, str) else value
    right = 2 * 7 / 8 * 1e9 / 10e-3
    slips = [
        Slip(100e9, "That is algbw, S/t: it says nothing of how hard the link worked."),
        Slip(200e9, "(N-1)/N is missing: nobody sends itself its own chunk."),
        Slip(right / 2, "That is a reduce-scatter or an all-gather; an all-reduce is both."),
        Slip(2 * right, "That is sending and receiving together: a link is rated for one of them."),
        Slip(8 * right, "That is all eight ranks together, or bits: give one rank's bytes."),
        Slip(right / 100, "That is what a rank sends in the 10 ms: how much is it in a second?"),
        Slip(100e9 * 4 / 7, "You divided by 2(N-1)/N: more than S passes the link, not less."),
    ]
    expect_bytes(value, right, "What each of 8 ranks sends in a second", slips)
