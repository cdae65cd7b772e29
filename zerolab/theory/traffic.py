"""Bytes that a rank sends in one optimizer step, per collective and stage.

Two forms of each volume: the papers' large-N form (a reduce-scatter sends Ψ elements) and the exact
ring form with (N-1)/N. Sources: ZeRO (arXiv 1910.02054) §7, nccl-tests PERFORMANCE.md for the ring,
FSDP (arXiv 2304.11277) §3.2.2 for hybrid sharding. A rank receives as much as it sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy as sp

from zerolab.theory.derivation import Derivation, quotient
from zerolab.theory.memory import DEFAULT_RECIPE, Recipe, padded_params, recipe_named
from zerolab.theory.notation import COLLECTIVES, A, B, G, N_d, Psi, S, W, alpha
from zerolab.theory.values import one_of, whole

RING = (N_d - 1) / N_d


@dataclass(frozen=True)
class Schedule:
    """How often each collective passes over all parameters in a step of A micro-batches."""

    name: str
    all_reduce: sp.Expr
    reduce_scatter: sp.Expr
    all_gather: sp.Expr
    reason: str


_0, _1 = sp.Integer(0), sp.Integer(1)
SCHEDULES: dict[int | str, Schedule] = {
    0: Schedule("stage 0", _1, _0, _0, "gradients are summed once, after the last micro-batch"),
    1: Schedule("stage 1", _0, _1, _1, "gradients to their owners once, new parameters back once"),
    2: Schedule("stage 2", _0, A, _1, "gradients leave after every backward; parameters return"),
    3: Schedule("stage 3", _0, A, 2 * A, "gathered for forward and backward; gradients leave"),
    "ddp-every-backward": Schedule("data parallel without no_sync", A, _0, _0,
                                   "gradients are summed after every backward"),
    "lecture-stage-1": Schedule("stage 1 as the lecture words it", _1, _0, _1,
                                "whole gradients on every rank, then new parameters"),
    "shard-grad-op": Schedule("parameters kept from forward to backward", _0, A, A,
                              "FSDP SHARD_GRAD_OP; FSDP2 reshard_after_forward=False"),
}  # fmt: skip


def schedule(stage: int | str) -> Schedule:
    """The schedule of a stage (0 to 3) or of a named variant."""
    return SCHEDULES[one_of("Stage", stage, SCHEDULES)]


def _element_bytes(recipe: str | Recipe, reduce_bytes: int | None) -> dict[str, int]:
    r = recipe_named(recipe)
    reduce = r.reduce_bytes if reduce_bytes is None else whole("reduce_bytes", reduce_bytes, 1)
    # an all-reduce is a reduce-scatter followed by an all-gather: every element twice
    return dict(zip(COLLECTIVES, (2 * reduce, reduce, r.gather_bytes), strict=True))


def sent(
    stage: int | str, recipe: str | Recipe = DEFAULT_RECIPE, *,
    micro_batches: sp.Expr | int = 1, exact: bool = False, reduce_bytes: int | None = None,
) -> dict[str, sp.Expr]:  # fmt: skip
    """Bytes sent per rank and step by each collective, in Ψ (and N_d where exact)."""
    plan, sizes = schedule(stage), _element_bytes(recipe, reduce_bytes)
    factor = RING if exact else _1
    return {
        name: getattr(plan, name).subs(A, micro_batches) * sizes[name] * Psi * factor
        for name in COLLECTIVES
    }


def sent_bytes(
    stage: int | str, ranks: int, params: float, recipe: str | Recipe = DEFAULT_RECIPE,
    units: Sequence[int] | None = None, micro_batches: int = 1, reduce_bytes: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Exact bytes that each rank sends in a step, padding and (N-1)/N included.

    An all-reduce of S padded elements of b bytes sends 2(N-1)(S/N)b; one rank sends nothing.
    """
    n, times = whole("ranks", ranks, 1), whole("micro_batches", micro_batches, 1)
    plan, sizes = schedule(stage), _element_bytes(recipe, reduce_bytes)
    each_shard = padded_params(params, units, n) // n * (n - 1)
    each = {
        name: int(getattr(plan, name).subs(A, times)) * each_shard * sizes[name]
        for name in COLLECTIVES
    }
    return {**each, "total": sum(each.values())}


def derive_ring(collective: str) -> Derivation:
    """Bytes that a ring collective sends per rank, for a full buffer of S bytes."""
    title, unit = f"Ring {one_of('Collective', collective, COLLECTIVES)}", "bytes sent per rank"
    if collective == "all_reduce":
        parts, why = dict.fromkeys(COLLECTIVES[1:], S * RING), "sum, then hand round"
        return Derivation(title, parts, why, unit=unit).then(2 * S * RING, "two passes")
    why = "N_d - 1 rounds, each passing one chunk of S/N_d bytes to the neighbour"
    rounds = sp.Mul(N_d - 1, S / N_d, evaluate=False)  # as it is counted, before it is regrouped
    return Derivation(title, rounds, why, unit=unit).then(S * RING, "regrouped")


def derive_sent(
    stage: int | str, recipe: str | Recipe = DEFAULT_RECIPE, reduce_bytes: int | None = None
) -> Derivation:
    """What a rank sends in a step of one micro-batch, from its collectives (ZeRO §7)."""
    r, passes = recipe_named(recipe), schedule(stage)
    volumes = sent(stage, r, exact=True, reduce_bytes=reduce_bytes)
    parts: dict[str, sp.Expr | int] = {}
    if passes.all_gather == 2 * A:
        half = volumes.pop("all_gather") / 2
        parts = {"all_gather, forward": half, "all_gather, backward": half}
    parts |= {name: volume for name, volume in volumes.items() if volume != 0}
    total = sum(sent(stage, r, reduce_bytes=reduce_bytes).values())
    title, unit = f"Traffic of {passes.name}, {r.name}", "bytes sent per rank and step"
    start = Derivation(title, parts, passes.reason, unit=unit, of="V")
    step = start.then(total * RING, "added up; (N_d - 1)/N_d taken out")
    return step.limit(N_d, sp.oo, "many ranks: the form that the papers print, an upper bound")


def derive_ratio(
    stage: int | str = 3, recipe: str | Recipe = DEFAULT_RECIPE, reduce_bytes: int | None = None
) -> Derivation:
    """A stage's traffic over plain data parallelism's, in one unit: 3/2 at stage 3."""
    top, low = (
        sum(sent(which, recipe, exact=True, reduce_bytes=reduce_bytes).values())
        for which in (stage, 0)
    )
    title = f"Traffic of {schedule(stage).name} over data parallelism"
    why = "bytes over bytes, the ring's factor in both"
    start = Derivation(title, quotient(top, low), why, unit="times")
    return start.then(sp.cancel(top / low), "Ψ and (N_d - 1)/N_d cancel")


def derive_three_times() -> Derivation:
    """Where "3x" comes from: stage 3 in bytes over data parallelism in elements."""
    size = sp.Symbol("e", positive=True)
    title, unit = "Why 3x is not a ratio of volumes", "bytes per element"
    why = "stage 3 in bytes (3 passes of e bytes) over data parallelism in elements"
    start = Derivation(title, quotient(3 * size * Psi, 2 * Psi), why, unit=unit)
    why = "Ψ cancels; the ratio of volumes is 3/2, and e stays"
    step = start.then(sp.Rational(3, 2) * size, why)
    why = "16-bit elements: 3 bytes per element, which is no ratio of volumes"
    return step.substitute({size: sp.Integer(2)}, why)


def derive_accumulation(stage: int | str) -> Derivation:
    """Elements sent per step with A micro-batches, in the large-N form: 2, 2, A+1, 3A times Ψ."""
    passes = schedule(stage)
    weights = zip(COLLECTIVES, (2, 1, 1), strict=True)
    parts = {name: weight * getattr(passes, name) * Psi for name, weight in weights}
    parts = {name: volume for name, volume in parts.items() if volume != 0}
    title, unit = f"{passes.name} with A micro-batches", "elements sent per rank and step"
    start = Derivation(title, parts, passes.reason, unit=unit)
    return start.then(sum(parts.values()), "added up")


def ring_time_s(
    collective: str, size_bytes: sp.Expr | float = S, ranks: sp.Expr | int = N_d,
    bytes_per_s: sp.Expr | float = B, latency_s: sp.Expr | float = alpha,
) -> sp.Expr:  # fmt: skip
    """Seconds of a ring collective, alpha-beta model; `bytes_per_s` is one direction.

    (N-1)α + (N-1)/N · S/B, twice that for an all-reduce. The cost of adding is left out.
    """
    one_of("Collective", collective, COLLECTIVES)
    n, size, speed, latency = map(sp.nsimplify, (ranks, size_bytes, bytes_per_s, latency_s))
    return (2 if collective == "all_reduce" else 1) * (n - 1) * (latency + size / (n * speed))


HYBRID = {  # what a rank sends to other hosts in a step, in units of the model (FSDP §3.2.2)
    "replicate": 2 / W * (W - 1),
    "full": 3 * (W - 1) / W,
    "hybrid": 2 / (G * W) * (W - G),  # all-reduce of a 1/G shard over the W/G groups
    "hybrid as printed": 2 * (W - 1) / (G * W),  # FSDP §3.2.2
}


def derive_hybrid() -> Derivation:
    """Cross-host traffic of hybrid sharding: an all-reduce of a shard between W/G hosts."""
    title, unit = "Hybrid sharding, cross-host traffic", "elements sent per rank and step"
    why = (
        "an all-reduce, 2S(1 - 1/N), of the S = Ψ/G gradients that a rank owns, over N = W/G hosts"
    )
    owned = sp.Mul(2, Psi / G, 1 - G / W, evaluate=False)
    start = Derivation(title, owned, why, unit=unit)
    return start.then(HYBRID["hybrid"] * Psi, "over one denominator")
