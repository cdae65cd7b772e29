"""What the names of FSDP, DDP and DeepSpeed mean in bytes: a dictionary with formulas for entries.

Sources: the docstring of torch.distributed.fsdp.ShardingStrategy and of fully_shard; FSDP (arXiv
2304.11277) §3.2; ZeRO §5, §7; DeepSpeed's configuration page for what its stages divide.
"""

from dataclasses import dataclass

import sympy as sp

from zerolab.theory.memory import held, recipe_named
from zerolab.theory.notation import G, N_d, Psi, W
from zerolab.theory.traffic import HYBRID, schedule, sent
from zerolab.theory.values import one_of


@dataclass(frozen=True)
class Layout:
    """One entry; formulas are bytes per rank in Ψ, N_d and, where hybrid, G ranks that share.

    `stage` says what is divided after backward, `schedule` what is sent; `kept` parameters are
    whole from forward to the end of backward, in the precision that they are gathered in.
    """

    name: str
    stage: int
    schedule: int | str
    recipe: str
    kept: bool = False
    hybrid: bool = False
    also: str = ""

    def states(self) -> sp.Expr:
        """Parameters, gradients and optimizer states when backward is done."""
        total = sp.expand(sum(held(self.stage, self.recipe).values()))
        return total.subs(N_d, G) if self.hybrid else total

    def whole(self) -> sp.Expr:
        """On top of them at the end of forward: whole parameters that are kept for backward."""
        return recipe_named(self.recipe).gather_bytes * Psi if self.kept else sp.Integer(0)

    def sent(self) -> sp.Expr:
        """Sent in a step of one micro-batch, in the exact form with (N-1)/N."""
        total = sum(sent(self.schedule, self.recipe, exact=True).values())
        if not self.hybrid:
            return total
        within, reduce = total.subs(N_d, G), recipe_named(self.recipe).reduce_bytes
        return within + reduce * Psi * HYBRID["hybrid"].subs(W, N_d)

    def gathers(self) -> int:
        """All-gathers of each unit's parameters in a step of one micro-batch."""
        plan = schedule(self.schedule)
        return int(plan.all_gather.subs(dict.fromkeys(plan.all_gather.free_symbols, 1)))

    def bytes_of(self, params: float, ranks: int, group: int = 2) -> dict[str, float]:
        """The three formulas as numbers: "states", "whole" and "sent"."""
        known = {Psi: params, N_d: ranks, G: group}
        return {name: float(getattr(self, name)().subs(known))
                for name in ("states", "whole", "sent")}  # fmt: skip


_FP32, _FSDP, _MIXED = "adamw-fp32", "fsdp2-mixed", "adamw-mixed"
_ROWS = (
    Layout("DDP", 0, 0, _FP32, also="data parallelism"),
    Layout("NO_SHARD", 0, 0, _FSDP, also="close to DDP, deprecated"),
    Layout("our stage 1", 1, 1, _MIXED, also="divided as by DeepSpeed stage 1"),
    Layout("our stage 2", 2, 2, _MIXED, also="divided as by DeepSpeed stage 2"),
    Layout("SHARD_GRAD_OP", 3, "shard-grad-op", _FSDP, kept=True, also="called ZeRO-2"),
    Layout("reshard_after_forward=False", 3, "shard-grad-op", _FSDP, kept=True, also="FSDP2"),
    Layout("our stage 3", 3, 3, _MIXED, also="DeepSpeed stage 3"),
    Layout("FULL_SHARD", 3, 3, _FSDP, also="called ZeRO-3"),
    Layout("reshard_after_forward=True", 3, 3, _FSDP, also="FSDP2"),
    Layout("HYBRID_SHARD", 3, 3, _FSDP, hybrid=True, also="FSDP2: a mesh of two dimensions"),
)
LAYOUTS: dict[str, Layout] = {row.name: row for row in _ROWS}


def layout(name: str) -> Layout:
    """The entry of that name; ValueError with the nearest names where there is none."""
    return LAYOUTS[one_of("Layout", name, LAYOUTS)]
