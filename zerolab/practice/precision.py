"""Precision recipes that the stages can run: the names are those of the theory's recipes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters and gradients, and whether fp32 master weights exist beside them."""

    working: torch.dtype
    master_weights: bool


PRECISIONS = {
    "adamw-mixed": Precision(torch.bfloat16, master_weights=True),  # 2+2+4+4+4 bytes
    "adamw-fp32": Precision(torch.float32, master_weights=False),  # 4+4+0+4+4 bytes
}


def precision_of(recipe: str) -> Precision:
    """The recipe of that name; ValueError, with the names there are, for any other."""
    if recipe not in PRECISIONS:
        raise ValueError(
            f"Ranks cannot run the recipe {recipe!r}: choose one of {', '.join(PRECISIONS)}."
        )
    return PRECISIONS[recipe]
