"""Stage 3 of ZeRO: the parameters are partitioned too (Rajbhandari et al. 2020, section 5.3).

A unit's parameters are gathered right before forward needs them, freed right after, and
gathered once more for backward. Each step all parameters travel twice and all gradients once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.gathering import ParameterGathering
from zerolab.practice.guards import one_pass
from zerolab.practice.norm import clip_scale
from zerolab.practice.precision import precision_of
from zerolab.practice.reduction import GradientReduction
from zerolab.practice.unit import Unit, all_units, make_units, modules_of


class Stage3:
    """Wraps a model with `units()` that has the same fp32 weights on every rank.

    Each rank holds its own shards of everything: 16/N bytes for each padded element with
    "adamw-mixed". Inside a step the whole parameters of one unit exist too (two with
    `prefetch`), and during backward its whole gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        options: AdamWOptions | None = None,
        recipe: str = "adamw-mixed",
        overlap: bool = False,
        prefetch: bool = False,
    ) -> None:
        self.model, self.comm = model, comm

        def claim(unit: Unit) -> None:
            unit.own(comm.world_size, comm.rank, options, apart=True)

        modules, precision = modules_of(model), precision_of(recipe)
        self.needs = make_units(model, modules, comm, precision, claim)
        self.units = all_units(self.needs)
        self.gathering = ParameterGathering(model, self.needs, comm, prefetch)
        self.reduction = GradientReduction(self.units, comm, overlap)
        self.reduction.after_unit = self.gathering.free

    def backward(self, loss: Tensor) -> None:
        """Adds the sums over ranks to each unit's `grad_shard`; gathers every unit once."""
        with one_pass(self, loss), self.gathering.for_backward():
            loss.backward()
            self.reduction.finish()

    @torch.no_grad()
    def step(self, max_norm: float | None = None, loss_scale: float | None = None) -> None:
        """Updates the own shards; nothing is sent until forward needs a unit."""
        trainable = [unit for unit in self.units if unit.trainable]
        scale = clip_scale(self.comm, [u.own_grads() for u in trainable], max_norm, loss_scale)
        for unit in trainable:
            unit.adamw.update(unit.own_grads(), scale)
            unit.param_shard.copy_(unit.adamw.master)
            unit.grad_shard = None
