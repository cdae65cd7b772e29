"""What a rank holds besides model states. Shown apart, never added without saying so.

Activations have two published estimates that differ by a factor of five; each is named:
"zero" is ZeRO's 12·hidden·batch·sequence·layers elements (arXiv 1910.02054, §3.2), "korthikanti" is
34sbh + 5as²b bytes a layer (arXiv 2205.05198, §4), for 16-bit numbers with dropout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import sympy as sp

from zerolab.theory.derivation import Derivation
from zerolab.theory.memory import Recipe
from zerolab.theory.notation import L, a, b, h, s, t
from zerolab.theory.values import one_of

RECOMPUTE = ("none", "selective", "full")
BUCKET = 5 * 10**8  # elements: DeepSpeed's reduce_bucket_size and allgather_bucket_size by default
FREE_AT_FAILURE = sp.Rational(3, 10)  # ZeRO §3.2: out of memory with over 30 % of it free


@dataclass(frozen=True)
class Residual:
    """Bytes per rank besides states, as an interval, with where the figure is from."""

    name: str
    low: int
    high: int
    source: str
    tier: str = "gpu"


@cache
def derive_activations(
    recompute: str = "none", formula: str = "korthikanti", sequence_parallel: bool = False
) -> Derivation:
    """Bytes that a forward pass leaves for its backward, from what one layer keeps.

    Tensor parallelism by t divides what lies between two matrix products; sequence parallelism
    also divides what lies outside them.
    """
    one_of("Activation formula", formula, ("zero", "korthikanti"))
    one_of("Recomputation", recompute, RECOMPUTE if formula == "korthikanti" else ("none", "full"))
    apart = 1 / t if sequence_parallel else sp.Integer(1)
    if recompute == "full":
        why = "one layer keeps its input, 2 bytes an element; the rest is computed again"
        parts = {"the layer's input": 2 * s * b * h * (1 if formula == "zero" else apart)}
    elif formula == "zero":
        why, parts = "one layer, ZeRO's estimate", {"12 elements of 2 bytes": 24 * s * b * h}
    else:
        why = "one layer: 11sbh + 5as²b for attention, 19sbh for the MLP, 4sbh for two layer norms"
        scores = {"attention scores": 5 * a * s**2 * b / t} if recompute == "none" else {}
        parts = {
            "attention": s * b * h * (8 / t + 3 * apart),
            **scores,
            "MLP": s * b * h * (16 / t + 3 * apart),
            "layer norms": 4 * s * b * h * apart,
        }
    title = f"Activations, {formula}, recomputation: {recompute}"
    each = Derivation(title, {k: L * v for k, v in parts.items()}, f"{why}; L layers",
                      unit="bytes per rank")  # fmt: skip
    return each.then(L * s * b * sp.expand(sum(parts.values()) / s / b), "added up")


@cache
def activation_bytes(
    layers: int, hidden: int, heads: int, sequence: int, micro_batch: int = 1,
    recompute: str = "none", formula: str = "korthikanti", tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> int:  # fmt: skip
    """The result of `derive_activations` in numbers; a layer's working set comes on top."""
    kept = derive_activations(recompute, formula, sequence_parallel).result
    values = {L: layers, h: hidden, a: heads, s: sequence, b: micro_batch, t: tensor_parallel}
    return int(sp.ceiling(kept.subs(values)))


def gathered_bytes(units: Sequence[int], recipe: Recipe, prefetch: int = 1) -> int:
    """Whole parameters at stage 3's peak: the unit at work and those gathered ahead (FSDP §3.2.1).

    Counted for the largest unit and its successors in size, an upper bound.
    """
    return recipe.gather_bytes * sum(sorted(units, reverse=True)[: 1 + prefetch])


def fused_buffer(params: int, constant: bool = False, element: int = 4) -> Residual:
    """Gradients copied side by side before they are reduced: all of them, or a constant size.

    ZeRO §6.2 (C_B) replaces the first by the second; buckets are that constant buffer.
    """
    if constant:
        size = min(params, BUCKET) * element
        return Residual("fused buffer, constant size", 0, size, "C_B; DeepSpeed's default, 5e8")
    return Residual("fused buffer of all gradients", 0, params * element, "ZeRO §3.2, in fp32")


def fragmentation(capacity_bytes: int) -> Residual:
    """An interval: nothing at best, 30 % of the device at worst."""
    most = int(capacity_bytes * FREE_AT_FAILURE)
    return Residual("fragmentation", 0, most, "ZeRO §3.2: failures with over 30 % free")


CONTEXT = Residual("framework context", 10**9, 2 * 10**9, "Hugging Face, Model training anatomy")
