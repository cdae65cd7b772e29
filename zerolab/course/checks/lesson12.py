"""Lesson 12: the summary's numbers, the reductions for any number of ranks, and which stage."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from zerolab.course.checks.core import Wrong, exercise, shown
from zerolab.course.checks.functions import (
    FORMULAS,
    Misstep,
    expect_function,
    plain,
    same_plain,
    without,
)
from zerolab.course.checks.quiz import Question, expect_answers
from zerolab.theory.plan import plan

QUESTIONS = (
    Question("ZeRO-1 limit", 4, {
        3: "That is near what 8 ranks give. What remains when 12Ψ/N has gone to nothing?",
        16 / 5.5: "That is the value for 8 ranks: let N grow.",
        4 / 3: "That is 16 over 12: what remains on each rank is 4Ψ, not 12Ψ.",
        16: "Parameters and gradients stay whole: 4Ψ remain, however many ranks there are.",
    }, "16Ψ over what remains of 4Ψ + 12Ψ/N."),
    Question("ZeRO-2 limit", 8, {
        4: "That is near what 8 ranks give, and it is stage 1's limit.",
        16 / 3.75: "That is the value for 8 ranks: let N grow.",
        16: "The parameters stay whole: 2Ψ remain.",
        16 / 14: "That is 16 over 14: what remains on each rank is 2Ψ, not 14Ψ.",
    }, "16Ψ over what remains of 2Ψ + 14Ψ/N."),
    Question("stage 3 traffic", 1.5, {
        3: "3 divides stage 3's 6Ψ bytes by data parallelism's 2Ψ elements: take one unit.",
        6: "6Ψ is what it sends, in bytes: divide by what data parallelism sends, 4Ψ.",
        2: "That is its two all-gathers in units of Ψ elements: the gradients travel, too.",
        1: "Parameters are gathered twice, in place of once: it is more.",
    }, "Three passes against two."),
    Question("stage 1 by all-reduce", 1.5, {
        1: "Only with a reduce-scatter: an all-reduce is as much as stage 1 may send in all.",
        3: "It sends three passes; data parallelism sends two.",
        2: "All-reduce is two passes, all-gather is one.",
        6: "6Ψ is what it sends, in bytes: divide by what data parallelism sends, 4Ψ.",
    }, "An all-reduce is two passes, an all-gather one; data parallelism is an all-reduce."),
    Question("stage 2, A = 4", 2.5, {
        1: "Only with one micro-batch: gradients leave after every backward.",
        5: "Five passes is what it sends; data parallelism sends two.",
        4: "The new parameters are gathered once a step, not four times: 4 + 1 passes against 2.",
        6: "6 is stage 3's ratio, 12 passes against 2.",
        2: "Four passes of gradients, and one of parameters: 5 against 2.",
    }, "A + 1 passes against two."),
    Question("ZeRO-Offload", ("cpu", "cpu memory", "cpu's memory", "cpu ram", "host", "host memory",
                              "host ram", "ram", "dram", "main memory", "system memory"), {
        "disk": "A disk came with ZeRO-Infinity.",
        "nvme": "NVMe came with ZeRO-Infinity.",
        "cpu/nvme": "The summary says so; NVMe came with ZeRO-Infinity.",
        "cpu and nvme": "The summary says so; NVMe came with ZeRO-Infinity.",
        "gpu": "Optimizer states leave the GPU: that is its point.",
    }, "Its name is of 2021, before ZeRO-Infinity: which memory did it have?"),
    Question("divided by N", ("model states", "model state", "states"), {
        "everything": "Activations, buffers and fragmentation are as large as before.",
        "all memory": "Activations, buffers and fragmentation are as large as before.",
        "activations": "Activations belong to a rank's own batch, and are as large as before.",
        "parameters": "Parameters, gradients and optimizer states: there is a word for the three.",
        "optimizer states": "That is stage 1: stage 3 divides two more kinds.",
    }, "Two words, for parameters, gradients and optimizer states together."),
)  # fmt: skip


@exercise(
    "12.1",
    "The summary's numbers, put right",
    points=len(QUESTIONS),
    hints=[
        "Limits: write 16Ψ over the stage's formula and let N grow.",
        "Traffic: count passes over all parameters. An all-reduce is two, the others are one.",
        "Data parallelism sends two passes. With A micro-batches stage 2 sends A + 1.",
    ],
)
def summary(answer: Any) -> None:
    expect_answers(answer, QUESTIONS)


def _held(stage: int, ranks: int, optimizer: int = 12) -> Fraction:
    """Bytes per parameter that a rank holds: the stages' formulas, padding left out."""
    kept, shared = [(4 + optimizer, 0), (4, optimizer), (2, 2 + optimizer), (0, 4 + optimizer)][
        stage
    ]
    return kept + Fraction(shared, ranks)


def _constant(*values: float) -> Any:
    return lambda stage, ranks: ranks if stage == 3 else values[stage]


@exercise(
    "12.2",
    "Reductions for any number of ranks",
    points=2,
    hints=[
        "16 bytes, divided by what the stage holds: 16, 4 + 12/N, 2 + 14/N, 16/N.",
        "Check yourself: on one rank every stage gives 1, and on eight 1, 2.9, 4.3 and 8.",
    ],
)
def reduction(answer: Any) -> None:
    expect_function(
        without(answer, *FORMULAS),
        lambda stage, ranks: 16 / _held(stage, ranks),
        [(stage, ranks) for ranks in (8, 1, 4, 64, 1024) for stage in range(4)],
        [
            (_constant(1, 3, 4), "3 and 4 are what 8 ranks give, rounded: they depend on N."),
            (_constant(1, 2.9, 4.3), "2.9 and 4.3 are the values for 8 ranks: they depend on N."),
            (_constant(1, 4, 8), "4 and 8 are the limits, which no number of ranks reaches."),
            (lambda s, n: _held(s, n) / 16, "That is the share that is left: turn it over."),
            (lambda s, n: _held(s, n), "That is bytes per parameter: how many times less than 16?"),
            (lambda s, n: 12 / _held(s, n, 8), "You left the fp32 master weight out: K is 12."),
            (lambda s, n: 16 / (_held(s, n) if s != 2 else 4 + Fraction(12, n)),
             "Stage 2 divides the gradients as well: 2 + 14/N."),
            (lambda s, n: 16 / (_held(s, n) if s != 2 else 2 + Fraction(2, n) + 12),
             "Stage 2 divides gradients and optimizer states: it includes stage 1."),
            (lambda s, n: round(float(16 / _held(s, n)), 1), "Round when you print, not here."),
            (lambda s, n: round(float(16 / _held(s, n)), 2), "Round when you print, not here."),
            (lambda s, n: 1 if s == 0 else n, "Only stage 3 divides everything by N."),
        ],
        lambda stage, ranks: f"stage {stage} on {ranks} ranks",
        "16 over the stage's bytes per parameter.",
        same=_close,
    )  # fmt: skip


def _close(got: Any, wanted: Any) -> bool:
    number = plain(got)
    if type(number) not in (int, float) or abs(number) > 1e9:
        raise Wrong(f"You returned {shown(got)}.", "Return a number: how many times less.")
    return math.isclose(number, wanted, rel_tol=1e-3)


def _fits(stage: int, case: tuple[float, int, float, float], optimizer: int = 12) -> bool:
    params, ranks, gpu_gb, other_gb = case
    return _held(stage, ranks, optimizer) * int(params) + int(other_gb * 10**9) <= gpu_gb * 10**9


def _first(*case: float, optimizer: int = 12, order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    return next((stage for stage in order if _fits(stage, case, optimizer)), None)  # type: ignore


def _planned(params: float, ranks: int, gpu_gb: float, other_gb: float) -> int | None:
    """What the planner's exact bytes say."""
    room = gpu_gb * 10**9 - other_gb * 10**9
    return next((s for s in range(4) if plan(params, ranks, s).held["total"] <= room), None)


CASES = [(1e9, 8, 80, 10), (7e9, 8, 80, 10), (13e9, 8, 80, 20), (70e9, 64, 80, 20),
         (13e9, 8, 80, 8.5), (70e9, 8, 80, 10), (5e9, 2, 80, 45), (5e8, 64, 32, 30),
         (5e8, 1, 16, 8)]  # fmt: skip
FIRST_MISSTEPS: list[Misstep] = [
    (lambda *c: 3, "Stage 3 always: it sends half as much again, and even it may not fit."),
    (lambda *c: _first(*c, order=(3, 2, 1, 0)),
     "You begin with the stage that holds least: stage 3 sends half as much again. Begin at 0."),
    (lambda *c: _first(c[0], c[1], c[2] * 2**30 / 1e9, c[3]),
     "You took the GPU's GB for GiB: an 80 GB GPU has 80e9 bytes here."),
    (lambda *c: _first(c[0] * 1e9 / 2**30, *c[1:]),
     "You counted the states in GiB and the memory in GB: take one unit."),
    (lambda *c: _first(c[0], c[1], c[2], 0),
     "You filled the GPU with model states: activations and buffers need other_gb of it."),
    (lambda *c: _first(c[0], c[1], c[2], c[3] / c[1]),
     "You divided activations by the ranks: each rank has a batch of its own."),
    (lambda *c: _first(c[0], c[1], c[2], c[3] + 1e-9), "What fills the GPU exactly still fits."),
    (lambda *c: _first(*c, optimizer=8), "You left the fp32 master weight out: K is 12, not 8."),
    (lambda *c: 3 if _first(*c) is None else _first(*c),
     "Where no stage fits, say None: stage 3 is no answer then."),
    (lambda *c: 0 if c[0] * 16 <= c[1] * (c[2] - c[3]) * 1e9 else None,
     "You put all GPUs' memory together: at stage 0 each of them must hold everything."),
    (lambda *c: _first(c[0], c[1], c[1] * c[2], c[3]),
     "You put all GPUs' memory together: what a stage needs is what each of them holds."),
    (lambda *c: -1 if _first(*c) is None else _first(*c), "Where no stage fits, return None."),
    (lambda *c: None if _first(*c) is None else _first(*c) and 3,
     "You went from stage 0 to 3 at once: stages 1 and 2 send no more than data parallelism."),
]  # fmt: skip


@exercise(
    "12.3",
    "Which stage first",
    points=4,
    hints=[
        "Go through the stages from 0 on. What does each need on one GPU?",
        "Bytes per parameter: 16, 4 + 12/N, 2 + 14/N, 16/N; times params; plus other_gb · 1e9.",
        "Return the first stage that needs at most gpu_gb · 1e9, and None after the loop.",
    ],
)
def first_stage(answer: Any) -> None:
    expect_function(
        without(answer, *FORMULAS),
        _planned,
        CASES,
        FIRST_MISSTEPS,
        lambda params, ranks, gpu, other: (
            f"{params / 1e9:g}e9 parameters, {ranks} GPUs of {gpu} GB, {other} GB for the rest"
        ),
        "Work out the bytes of stages 0 to 3 in this case by hand, and compare.",
        same=lambda got, wanted: type(got) is not bool and same_plain(got, wanted),
    )
