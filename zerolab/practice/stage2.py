"""Stage 2 of ZeRO: the gradients are partitioned too (Rajbhandari et al. 2020, section 5.2).

A unit's gradients are sent to their owners as soon as backward has left the unit, and freed; a
rank keeps its own shard of the sums. The question it leaves open: between two uses nobody
looks at a unit's parameters. Why does every rank hold all of them?
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.guards import one_pass
from zerolab.practice.norm import clip_scale
from zerolab.practice.precision import precision_of
from zerolab.practice.reduction import GradientReduction
from zerolab.practice.unit import all_units, make_units, modules_of


class Stage2:
    """Wraps a model with `units()` that has the same fp32 weights on every rank.

    Each rank holds the parameters in full, and the gradients, master weights and both moments of
    its own shards: 2 + 14/N bytes for each padded element with "adamw-mixed". During backward
    the whole gradients of a unit exist too, one unit at a time (two with `overlap`).
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        options: AdamWOptions | None = None,
        recipe: str = "adamw-mixed",
        overlap: bool = False,
    ) -> None:
        self.model, self.comm = model, comm
        self.needs = make_units(model, modules_of(model), comm, precision_of(recipe))
        self.units = all_units(self.needs)
        for unit in self.units:
            unit.own(comm.world_size, comm.rank, options)
        self.reduction = GradientReduction(self.units, comm, overlap)

    def backward(self, loss: Tensor) -> None:
        """Adds the sums over ranks to each unit's `grad_shard`; sends every gradient once."""
        with one_pass(self, loss):
            loss.backward()
            self.reduction.finish()

    @torch.no_grad()
    def step(self, max_norm: float | None = None, loss_scale: float | None = None) -> None:
        """Updates the own shards and all-gathers the new weights."""
        trainable = [unit for unit in self.units if unit.trainable]
        scale = clip_scale(self.comm, [u.own_grads() for u in trainable], max_norm, loss_scale)
        for unit in trainable:
            unit.adamw.update(unit.own_grads(), scale)
            unit.param_shard.copy_(unit.adamw.master)
            self.comm.all_gather(unit.full_params, unit.param_shard)
            unit.grad_shard = None
