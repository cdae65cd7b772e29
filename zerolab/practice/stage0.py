"""Stage 0, plain data parallelism: every rank holds everything.

The ranks work on different data and add their gradients up; then each of them computes the
same update. The question it leaves open: who needs the same Adam moments on every rank?
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


class Stage0:
    """Wraps a model that has the same fp32 weights on every rank.

    Each rank holds parameters, gradients, master weights and both moments in full, padded to a
    multiple of the world size: 16 bytes for each of its elements with "adamw-mixed".
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
            unit.own(1, 0, options)  # the whole is the only shard

    def backward(self, loss: Tensor) -> None:
        """Adds this rank's gradients to each unit's `full_grads`; sends nothing."""
        with one_pass(self, loss):
            loss.backward()

    @torch.no_grad()
    def step(self, max_norm: float | None = None, loss_scale: float | None = None) -> None:
        """Averages the gradients over ranks and updates all weights, on every rank alike."""
        trainable = [unit for unit in self.units if unit.trainable]
        for unit in trainable:
            self.comm.all_reduce(unit.grads())
        n, rank = self.comm.world_size, self.comm.rank
        shards = [shard_of(unit.grads(), n, rank) for unit in trainable]
        scale = clip_scale(self.comm, shards, max_norm, loss_scale)
        for unit in trainable:
            unit.adamw.update(unit.grads(), scale)
            unit.param_shard.copy_(unit.adamw.master)
            unit.forget_grads()
