"""What a rank holds besides model states. Shown apart, never added without saying so.

Activations have two published estimates that differ by a factor of five; each is named:
"zero" is ZeRO's 12·hidden·batch·sequence·layers elements (arXiv 1910.02054, §3.2), "korthikanti" is
34sbh + 5as²b bytes a layer (arXiv 2205.05198, §4), for 16-bit numbers with dropout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import sympy as sp

from zerolab.theory.memory import Recipe
from zerolab.theory.notation import L, a, b, h, s, t
from zerolab.theory.values import one_of

RECOMPUTE = ("none", "selective", "full")
DEEPSPEED_BUCKET = 5 * 10**8  # elements: reduce_bucket_size and allgather_bucket_size by default
FREE_AT_FAILURE = sp.Rational(3, 10)  # ZeRO §3.2: out of memory with over 30 % of it free

_SBH = s * b * h
LAYER = {  # Korthikanti et al., table 2: bytes of a layer's activations, tensor parallel by t
    "none": _SBH * (10 + 24 / t + 5 * a * s / (h * t)),
    "selective": _SBH * (10 + 24 / t),
    "full": 2 * _SBH,
}
LAYER_SEQUENCE_PARALLEL = {
    "none": _SBH / t * (34 + 5 * a * s / h),
    "selective": 34 * _SBH / t,
    "full": 2 * _SBH / t,
}
ZERO = {"none": 24 * _SBH, "full": 2 * _SBH}  # 12 elements of 2 bytes; one checkpoint


@dataclass(frozen=True)
class Residual:
    """Bytes per rank besides states, as an interval, with where the figure is from."""

    name: str
    low: int
    high: int
    source: str
    tier: str = "gpu"


@cache
def activation_bytes(
    layers: int, hidden: int, heads: int, sequence: int, micro_batch: int = 1,
    recompute: str = "none", formula: str = "korthikanti", tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> int:  # fmt: skip
    """Bytes of the activations that a forward pass leaves for its backward, per rank.

    "full" recomputation keeps one checkpoint a layer; a layer's working set comes on top.
    """
    tables = {"korthikanti": LAYER_SEQUENCE_PARALLEL if sequence_parallel else LAYER, "zero": ZERO}
    table = tables[one_of("Activation formula", formula, tables)]
    expr = L * table[one_of("Recomputation", recompute, table)]
    values = {L: layers, h: hidden, a: heads, s: sequence, b: micro_batch, t: tensor_parallel}
    return int(sp.ceiling(expr.subs(values)))


def gathered_bytes(units: Sequence[int], recipe: Recipe, prefetch: int = 1) -> int:
    """Whole parameters at stage 3's peak: the unit at work and those gathered ahead (FSDP §3.2.1).

    Counted for the largest unit and its successors in size, an upper bound.
    """
    return recipe.gather_bytes * sum(sorted(units, reverse=True)[: 1 + prefetch])


def fragmentation(capacity_bytes: int) -> Residual:
    """An interval: nothing at best, 30 % of the device at worst."""
    most = int(capacity_bytes * FREE_AT_FAILURE)
    return Residual("fragmentation", 0, most, "ZeRO §3.2: failures with over 30 % free")


CONTEXT = Residual("framework context", 10**9, 2 * 10**9, "Hugging Face, Model training anatomy")
