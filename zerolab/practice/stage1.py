"""Stage 1 of ZeRO: the optimizer states are partitioned (Rajbhandari et al. 2020, section 5.1).

Each rank updates the slice of the weights that it owns, so it needs the states of that slice
alone; the updated slices are gathered afterwards. The question it leaves open: a rank uses only
its slice of the summed gradients. Why does it keep all of them?
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.guards import one_pass
from zerolab.practice.norm import clip_scale
from zerolab.practice.precision import precision_of
from zerolab.practice.sharding import shard_of
from zerolab.practice.unit import all_units, make_units


class Stage1:
    """Wraps a model that has the same fp32 weights on every rank.

    Each rank holds parameters and gradients in full, and the master weights and both moments of
    its own shard: 4 + 12/N bytes for each padded element with "adamw-mixed".
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        options: AdamWOptions | None = None,
        recipe: str = "adamw-mixed",
    ) -> None:
        self.model, self.comm = model, comm
        self.needs = make_units(model, [model], comm, precision_of(recipe))
        self.units = all_units(self.needs)
        for unit in self.units:
            unit.own(comm.world_size, comm.rank, options)

    def backward(self, loss: Tensor) -> None:
        """Adds this rank's gradients to each unit's `full_grads`; sends nothing."""
        with one_pass(self, loss):
            loss.backward()

    @torch.no_grad()
    def step(self, max_norm: float | None = None, loss_scale: float | None = None) -> None:
        """Reduce-scatters the gradients, updates the own shards, all-gathers the new weights."""
        trainable = [unit for unit in self.units if unit.trainable]
        for unit in trainable:
            unit.grad_shard = shard_of(unit.grads(), self.comm.world_size, self.comm.rank)
            self.comm.reduce_scatter(unit.grad_shard, unit.grads())
        scale = clip_scale(self.comm, [u.own_grads() for u in trainable], max_norm, loss_scale)
        for unit in trainable:
            unit.adamw.update(unit.own_grads(), scale)
            unit.param_shard.copy_(unit.adamw.master)
            self.comm.all_gather(unit.full_params, unit.param_shard)
            unit.grad_shard = None
            unit.forget_grads()
