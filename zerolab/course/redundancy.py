"""How much of what all ranks hold is there more than once: pieces told apart by their bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zerolab.practice.measure import digest

Pieces = dict[str, tuple[str, int]]
"""One rank's pieces of state: name -> (digest of its bits, bytes)."""


def fingerprints(tensors: dict[str, Tensor]) -> Pieces:
    """What one rank can say of its tensors in a few characters."""
    return {name: (digest(tensor), tensor.nbytes) for name, tensor in tensors.items()}


def states_after_step(engine: Any) -> Pieces:
    """This rank's parameters and optimizer states under a stage; gradients are gone by then."""
    found: dict[str, Tensor] = {}
    for place, unit in enumerate(engine.units):
        whole = unit.full_params.untyped_storage().nbytes() > 0
        adamw = unit.adamw
        pieces = {"parameters": unit.full_params if whole else unit.param_shard}
        pieces |= {"master": adamw.master, "momentum": adamw.momentum, "variance": adamw.variance}
        found |= {f"unit {place} {name}": tensor for name, tensor in pieces.items()}
    return fingerprints(found)


def redundant_bytes(ranks: Sequence[Pieces]) -> int:
    """Bytes that are there again: a piece of the same name and bits as an earlier rank's."""
    seen: set[tuple[str, str]] = set()
    again = 0
    for pieces in ranks:
        for name, (bits, size) in pieces.items():
            again += size if (name, bits) in seen else 0
            seen.add((name, bits))
    return again
