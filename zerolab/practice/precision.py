"""Precision recipes that the stages can run, and the loss scale that the one in fp16 needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Dtypes of parameters and gradients, and whether fp32 master weights exist beside them.

    `bytes_of` names the theory's recipe where that has another name: it counts bytes alone, and
    bf16 and fp16 have the same.
    """

    working: torch.dtype
    gradient: torch.dtype
    master_weights: bool
    bytes_of: str


PRECISIONS = {
    "adamw-mixed": Precision(torch.bfloat16, torch.bfloat16, True, "adamw-mixed"),  # 2+2+4+4+4
    "adamw-mixed-fp16": Precision(torch.float16, torch.float16, True, "adamw-mixed"),  # the same
    "adamw-mixed-fp32-grads": Precision(torch.bfloat16, torch.float32, True,
                                        "adamw-mixed-fp32-grads"),  # 2+4+4+4+4
    "adamw-fp32": Precision(torch.float32, torch.float32, False, "adamw-fp32"),  # 4+4+0+4+4
}  # fmt: skip


def precision_of(recipe: str) -> Precision:
    """The recipe of that name; ValueError, with the names there are, for any other."""
    if recipe not in PRECISIONS:
        raise ValueError(
            f"Ranks cannot run the recipe {recipe!r}: choose one of {', '.join(PRECISIONS)}."
        )
    return PRECISIONS[recipe]


@dataclass
class LossScale:
    """What the loss is multiplied by, so that small fp16 gradients are not rounded to zero.

    Every rank has the same. It doubles after 2,000 good steps on end, and is halved by a step in
    which a gradient overflows (fp16 ends at 65,504), which is then skipped: the defaults are those
    of torch.amp.GradScaler, which has no `smallest`. Powers of two change no bit of what is finite.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    smallest: float = 1.0
    good_steps: int = 0  # since the last change of the scale
    skipped_steps: int = 0  # in all

    @property
    def exhausted(self) -> bool:
        """No smaller scale is left: what overflows now is not the scale's fault."""
        return self.scale <= self.smallest

    def update(self, overflowed: bool) -> None:
        """After each step: was it skipped because a gradient overflowed?"""
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.skipped_steps += 1
            self.scale = max(self.smallest, self.scale * self.backoff)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * self.growth, 0

    def __str__(self) -> str:
        """As in "scale 32768, 1 step skipped"."""
        number = self.skipped_steps
        return f"scale {self.scale:.10g}, {number:,} step{'' if number == 1 else 's'} skipped"
