"""Lesson 13: the lecture's five exercises, with what they leave open stated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy as sp

from zerolab.course.checks.core import Given, Wrong, exercise, given_back, shown, type_of
from zerolab.course.checks.lesson02 import strangers
from zerolab.course.checks.numbers import Slip, expect_bytes, expect_number, read_number
from zerolab.theory.derivation import Derivation, difference
from zerolab.theory.notation import N_d, Psi, plain
from zerolab.theory.traffic import derive_sent

SIZES = [13e9, *(tenths * 1e8 for tenths in range(20, 400, 3))]
GPU_BYTES = 80e9
Part = Callable[[Any], None]


def expect_parts(answer: Any, parts: Mapping[str, tuple[float, Part]]) -> None:
    """Judges a dict part by part; what is right earns its points even if another part is wrong.

    `parts` maps each name to its points and to what raises Wrong for a wrong value.
    """
    values = given_back(answer)
    if not isinstance(values, dict) or set(values) != set(parts):
        got = f"a dict with {', '.join(map(shown, values))}" if isinstance(values, dict) else None
        raise Wrong(
            f"Your answer is {got or type_of(values)}.",
            f"Return a dict with exactly these entries: {', '.join(parts)}.",
        )
    wrong: list[Wrong] = []
    earned = 0.0
    for name, (points, judge) in parts.items():
        try:
            judge(values[name])
            earned += points
        except Wrong as error:
            wrong.append(error)
    if wrong:
        raise Wrong(wrong[0].difference, wrong[0].misconception, points=earned)


def size(right: float, what: str, slips: list[Slip]) -> Part:
    return lambda value: expect_bytes(value, right, what, slips)


def number(right: float, what: str, slips: list[Slip]) -> Part:
    return lambda value: expect_number(value, right, what, slips)


@exercise(
    "13.1",
    "Four layouts of one model",
    points=4,
    hints=[
        "16 bytes a parameter, in three kinds. Stage by stage one more kind is divided by N.",
        "16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N.",
    ],
    params=SIZES,
    ranks=[8, 4, 16, 32, 64],
)
def four_layouts(answer: Any, given: Given) -> None:
    psi, n = given.params, given.ranks
    right = {
        name: (16 - shared + shared / n) * psi
        for name, shared in (
            ("data parallel", 0),
            ("stage 1", 12),
            ("stage 2", 14),
            ("stage 3", 16),
        )
    }
    parts = {}
    for name, value in right.items():
        slips = [
            Slip(other, f"That is {layout}.") for layout, other in right.items() if layout != name
        ]
        if name != "data parallel":
            slips.append(Slip(value * n, "That is all ranks together: give one rank's bytes."))
        slips.append(
            Slip(value - 4 * psi / (1 if name == "data parallel" else n),
                 "You left out the fp32 master weights: K = 12 includes them.")
        )  # fmt: skip
        parts[name] = (1.0, size(value, f"{name}, each of {n} ranks", slips))
    expect_parts(answer, parts)


@exercise(
    "13.2",
    "Three passes, derived",
    points=3,
    hints=[
        "Which collectives does a step of stage 3 call, and on what?",
        "An all-gather before forward, one before backward, a reduce-scatter of the gradients.",
        (
            "Each moves 2Ψ bytes, of which a rank sends (N-1)/N. Give Derivation a dict of the "
            "three, then their sum with .then(...), then .at_most(6 * Psi, ...)."
        ),
    ],
)
def three_passes(answer: Any) -> None:
    derived = given_back(answer)
    if not isinstance(derived, Derivation):
        raise Wrong(
            f"Your answer is {type_of(derived)}.", "Return a Derivation: parts, then their sum."
        )
    if derived.title == derive_sent(3).title:
        raise Wrong("That is the package's own derivation.", "Write down the three parts yourself.")
    each, (first, *rest) = 2 * Psi * (N_d - 1) / N_d, derived.steps
    names = [name.lower() for name, _ in first.parts]
    if len(first.parts) != 3:
        raise Wrong(
            f"The derivation starts from {plain(first.expr)}, in {len(first.parts) or 'no'} parts.",
            "3 · 2Ψ/N · N says that there are three of something. Of what? Start from a dict of "
            "the three, by name.",
        )
    if [("gather" in n, "reduce" in n) for n in names].count((True, False)) != 2 or not any(
        "reduce" in n and "scatter" in n for n in names
    ):
        raise Wrong(
            f"The three parts are called {', '.join(names)}.",
            "Two of them gather parameters; the third moves the gradients to their owners, by a "
            "reduce-scatter.",
            points=1,
        )
    for name, value in first.parts:
        if alien := strangers(value):
            raise Wrong(
                f"The part {name} has a symbol {plain(alien[0])} that is not the course's.",
                "Only Psi and N_d may stand in it, from zerolab.theory.notation.",
                points=1,
            )
        if difference(value, each) != 0:
            raise Wrong(f"The part {name} is {plain(value)}.", _why_part(value), points=1)
    if not rest or difference(rest[0].expr, 3 * each) != 0:
        raise Wrong("The sum of the three is missing.", "Add .then(their sum, why).", points=2)
    last = derived.steps[-1]
    if (last.relation, last.expr) != ("<=", 6 * Psi) and last.relation != "-> [N_d -> oo]":
        raise Wrong(
            f"The last line is {plain(last.expr)}.",
            "6Ψ is its bound: end with .at_most(6 * Psi, why it is one).",
            points=2,
        )


def _why_part(value: sp.Expr) -> str:
    exact = (N_d - 1) / N_d
    if difference(value, Psi * exact) == 0 or difference(value, Psi) == 0:
        return "That is elements; a 16-bit element has 2 bytes."
    if difference(value, 2 * Psi) == 0:
        return "A rank need not send what it owns to itself: it sends (N-1)/N of the 2Ψ bytes."
    if difference(value, 2 * Psi / N_d) == 0:
        return "That is the own shard alone, sent once; it goes to each of the N-1 others."
    return "Each collective moves all 2Ψ bytes, of which a rank sends (N-1)/N."


@exercise(
    "13.3",
    "A hundred milliseconds of compute",
    points=3,
    hints=[
        "How many bytes does a rank send in a step of stage 3? With (N-1)/N.",
        "Divide by the link's bytes per second; 1 s is 1000 ms.",
        "Without overlap the two add up; with perfect overlap the longer one is all there is.",
    ],
    params=[7e9, 1e9, 3e9, 13e9, 20e9, 30e9, 70e9],
    ranks=[8, 4, 16],
    link_bytes_per_s=[400e9, 50e9, 100e9, 200e9, 300e9],
    compute_ms=[100, 60, 80, 150, 250],
)
def overhead(answer: Any, given: Given) -> None:
    share, link = (given.ranks - 1) / given.ranks, given.link_bytes_per_s / 1e3
    right = 6 * given.params * share / link
    compute = given.compute_ms

    def slips(step: Callable[[float], float]) -> list[Slip]:
        return [
            Slip(step(right / share), "(N-1)/N is missing: nobody sends his own shard to himself."),
            Slip(step(right * 2 / 3), "That is plain data parallelism, 4Ψ: stage 3 sends 6Ψ."),
            Slip(step(right / 2), "3Ψ counts elements, of 2 bytes each."),
            Slip(step(right / 3), "That is one collective: a step of stage 3 has three."),
            Slip(step(right * 2), "12Ψ is three times data parallelism: it is one and a half."),
            Slip(step(right) / 1e3, "That is seconds: give milliseconds."),
        ]

    parts = {
        "communication": (1.0, number(right, "Communication in ms", slips(lambda t: t))),
        "serial": (1.0, number(compute + right, "A step without overlap in ms", [
            Slip(max(compute, right), "That is with perfect overlap."),
            Slip(right, "That is communication alone: without overlap compute is added to it."),
            *slips(lambda t: compute + t),
        ])),
        "overlapped": (1.0, number(max(compute, right), "A step with perfect overlap in ms", [
            Slip(compute + right, "That is without overlap: the sum."),
            Slip(min(compute, right), "The step ends with the longer of the two."),
            *slips(lambda t: max(compute, t)),
        ])),
    }  # fmt: skip
    expect_parts(answer, parts)


TIERS = ("gpu", "cpu", "nvme")
STATES = {"parameters": 2, "gradients": 2, "optimizer states": 12}
ROOM_BYTES = 12e9  # on each GPU: checkpoints of one sequence, two gathered layers, the context


@exercise(
    "13.4",
    "A place for 175 billion parameters",
    points=4,
    hints=[
        "Write down the bytes of the three kinds, all ranks together, and the three capacities.",
        (
            "At stage 3 each GPU holds an eighth of what is on GPU. Fill the fastest tier first, "
            "with what is used most often: parameters, then gradients, then optimizer states."
        ),
        "12Ψ = 2100 GB against 2 TB: it does not fit into host memory, if only just.",
    ],
    params=[175e9, *(billions * 1e9 for billions in range(120, 200, 5))],
    host_bytes=[2e12, 1e12, 1.5e12, 3e12, 4e12],
)
def placement(answer: Any, given: Given) -> None:
    plan = given_back(answer)
    if not isinstance(plan, dict) or set(plan) != {"stage", *STATES}:
        raise Wrong(
            f"Your plan is {type_of(plan)}.",
            f"Return a dict with the entries stage, {', '.join(STATES)}.",
        )
    places = {kind: re.sub("^host", "cpu", str(plan[kind]).lower()) for kind in STATES}
    places = {kind: said.removesuffix("memory").strip() for kind, said in places.items()}
    for kind, tier in places.items():
        if tier not in TIERS:
            raise Wrong(
                f"{kind}: {shown(plan[kind])} is no tier.", f"Choose from {', '.join(TIERS)}."
            )
    if (stage := read_number(plan["stage"])) != 3:
        need = 2 * given.params
        if stage not in (0, 1, 2):
            raise Wrong(f"There is no stage {stage:g}.", "Choose from 0, 1, 2 and 3.")
        raise Wrong(
            f"At stage {stage:g} every GPU holds all parameters: {need / 1e9:g} GB.",
            "One GPU has 80 GB. Only stage 3 divides the parameters, wherever the rest lives.",
        )
    full = _overfull(places, given)
    if full:
        tier, need, capacity = full
        raise Wrong(
            f"{tier} must take {need / 1e9:,.5g} GB and has {capacity / 1e9:,.5g} GB.",
            _why_full(tier, places, given),
            points=1,
        )
    right: dict[str, str] = {}
    for kind, tier in places.items():
        right[kind] = next(t for t in TIERS if not _overfull({**right, kind: t}, given))
        if tier != right[kind]:
            raise Wrong(
                f"It fits, but {kind} need not be on {tier}: {right[kind]} has room for them.",
                "Each tier down is slower: fill them from the top, parameters first, then "
                "gradients, then optimizer states.",
                points=3,
            )


def _capacity(tier: str, given: Given) -> float:
    on_gpu = 8 * (GPU_BYTES - ROOM_BYTES)
    return {"gpu": on_gpu, "cpu": given.host_bytes, "nvme": 28e12}[tier]


def _overfull(places: Mapping[str, str], given: Given) -> tuple[str, float, float] | None:
    """The first tier that must take more than it has: its name, need and capacity in bytes."""
    for tier in TIERS:
        need = sum(STATES[kind] * given.params for kind, at in places.items() if at == tier)
        if need > _capacity(tier, given):
            return tier, need, _capacity(tier, given)
    return None


def _why_full(tier: str, places: Mapping[str, str], given: Given) -> str:
    if tier == "gpu":
        return (
            "Eight GPUs of 80 GB, less 12 GB on each for checkpoints, two gathered layers and the "
            "framework. Keep there what forward and backward touch, and move the rest down."
        )
    if places["optimizer states"] == "cpu":
        return (
            f"12Ψ are {12 * given.params / 1e9:g} GB: ZeRO-Offload's place for them is too small "
            "here. ZeRO-Infinity has one more tier."
        )
    return "Add up what you placed there."


@exercise(
    "13.5",
    "FULL_SHARD or SHARD_GRAD_OP",
    points=5,
    hints=[
        "Under FSDP both hold parameters, gradients and optimizer states in shards after backward.",
        (
            "SHARD_GRAD_OP keeps the gathered 16-bit parameters from forward to the end of "
            "backward: 2Ψ on top. FULL_SHARD has a unit or two at a time: leave them out."
        ),
        "So SHARD_GRAD_OP gathers once and FULL_SHARD twice; both reduce-scatter once.",
        "Peak plus activations against 80 GB: if SHARD_GRAD_OP fits, it sends less.",
    ],
    params=[7e9, 3e9, 5e9, 6e9, 6.7e9, 8e9],  # FULL_SHARD fits, whatever is drawn
    ranks=[4, 8, 16],
    activations_bytes=[20e9, 10e9, 30e9, 40e9, 45e9],
)
def two_strategies(answer: Any, given: Given) -> None:
    psi, n = given.params, given.ranks
    shards, share = 16 * psi / n, (n - 1) / n
    both = [
        Slip(2 * psi + 14 * psi / n, "That is textbook ZeRO-2, with whole parameters at all times. "
             "SHARD_GRAD_OP's parameters are in shards again after backward."),
        Slip(16 * psi, "That is unsharded, NO_SHARD."),
        Slip(12 * psi / n, "That is without the gradients' shards, as between two steps."),
    ]  # fmt: skip
    gathers = shards + 2 * psi
    fits = gathers + given.activations_bytes <= GPU_BYTES
    traffic = [
        Slip(3 * psi * share, "That is elements: each has 2 bytes."),
        Slip(2 * psi * share, "That is one collective; there are more in a step."),
    ]
    expect_parts(
        answer,
        {
            "held after backward": (1.0, size(shards, "Held by each rank after backward", both)),
            "peak of SHARD_GRAD_OP": (
                1.0,
                size(
                    gathers,
                    "SHARD_GRAD_OP's peak",
                    [
                        *both,
                        Slip(shards, "Between forward and backward the parameters stay gathered."),
                        Slip(shards + 4 * psi, "They are gathered in 16 bits: 2Ψ."),
                    ],
                ),
            ),
            "sent by FULL_SHARD": (
                1.0,
                size(
                    6 * psi * share,
                    "Sent by FULL_SHARD in a step",
                    [
                        Slip(6 * psi, "Times (N-1)/N: nobody sends to himself."),
                        Slip(4 * psi * share, "FULL_SHARD gathers for forward and for backward."),
                        *traffic,
                    ],
                ),
            ),
            "sent by SHARD_GRAD_OP": (
                1.0,
                size(
                    4 * psi * share,
                    "Sent by SHARD_GRAD_OP in a step",
                    [
                        Slip(4 * psi, "Times (N-1)/N: nobody sends to himself."),
                        Slip(6 * psi * share, "It keeps what it gathered: no second all-gather."),
                        *traffic,
                    ],
                ),
            ),
            "better": (1.0, lambda value: _choice(value, fits, gathers, given)),
        },
    )


def _choice(value: Any, fits: bool, peak: float, given: Given) -> None:
    right, other = ("SHARD_GRAD_OP", "FULL_SHARD")[:: 1 if fits else -1]
    said = re.sub(r"\W+", "_", str(value).rpartition(".")[2].strip().upper())
    if said == right:
        return
    total = (peak + given.activations_bytes) / 1e9
    if said != other:
        raise Wrong(f"better: {shown(value)} is none of the two.", f"Write {right!r} or {other!r}.")
    why = (
        f"SHARD_GRAD_OP needs {total:.4g} GB with activations: it fits, and sends a third less."
        if fits
        else f"SHARD_GRAD_OP needs {total:.4g} GB with activations: more than 80 GB."
    )
    raise Wrong(f"better: not {other}, here.", why)
