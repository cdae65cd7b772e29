"""Stage 1 of ZeRO: the optimizer states are partitioned (Rajbhandari et al. 2020, section 5.1).

Each rank updates the slice of the weights that it owns, so it needs the states of that slice
alone; the updated slices are gathered afterwards. The question it leaves open: a rank uses only
its slice of the summed gradients. Why does it keep all of them?
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerolab.practice.adamw import AdamW, AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.meter import label
from zerolab.practice.precision import precision_of
from zerolab.practice.sharding import flatten, padded_numel, shard_of, views


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
        precision = precision_of(recipe)
        params = list(model.parameters())
        shapes = [p.shape for p in params]
        length = padded_numel(sum(p.numel() for p in params), comm.world_size)

        weights = flatten([p.data for p in params], length, torch.float32)
        self.full_params = label(weights.to(precision.working), "parameters")
        self.full_grads = label(torch.zeros_like(self.full_params), "gradients")
        self.param_shard = shard_of(self.full_params, comm.world_size, comm.rank)
        self.grad_shard = shard_of(self.full_grads, comm.world_size, comm.rank)
        master = shard_of(weights, comm.world_size, comm.rank).clone()
        label(master, "optimizer_states")
        self.adamw = AdamW(master if precision.master_weights else self.param_shard, options)

        for param, data, grad in zip(
            params, views(self.full_params, shapes), views(self.full_grads, shapes), strict=True
        ):
            param.data, param.grad = data, grad

    def backward(self, loss: Tensor) -> None:
        """Adds this rank's gradients to `full_grads` (padded numel,); sends nothing."""
        loss.backward()

    @torch.no_grad()
    def step(self) -> None:
        """Reduce-scatters the gradients, updates the own shard, all-gathers the new weights."""
        self.comm.reduce_scatter(self.grad_shard, self.full_grads)
        self.adamw.update(self.grad_shard, scale=1 / self.comm.world_size)
        self.param_shard.copy_(self.adamw.master)
        self.comm.all_gather(self.full_params, self.param_shard)
        self.full_grads.zero_()

    def full_weights(self) -> Tensor:
        """The fp32 weights (padded numel,), gathered from every rank's master shard."""
        full = torch.empty(self.full_params.numel())
        self.comm.all_gather(full, self.adamw.master.float())
        return full
