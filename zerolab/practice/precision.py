"""Precision recipes that the stages can run: the names are those of the theory's recipes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Dtypes of parameters and gradients, and whether fp32 master weights exist beside them."""

    working: torch.dtype
    gradient: torch.dtype
    master_weights: bool


PRECISIONS = {
    "adamw-mixed": Precision(torch.bfloat16, torch.bfloat16, True),  # 2+2+4+4+4 bytes
    "adamw-mixed-fp32-grads": Precision(torch.bfloat16, torch.float32, True),  # 2+4+4+4+4
    "adamw-fp32": Precision(torch.float32, torch.float32, False),  # 4+4+0+4+4
}


def precision_of(recipe: str) -> Precision:
    """The recipe of that name; ValueError, with the names there are, for any other."""
    if recipe not in PRECISIONS:
        raise ValueError(
            f"Ranks cannot run the recipe {recipe!r}: choose one of {', '.join(PRECISIONS)}."
        )
    return PRECISIONS[recipe]
