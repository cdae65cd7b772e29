"""Stage 0, plain data parallelism: every rank holds everything.

The ranks work on different data and add their gradients up; then each of them computes the
same update. The question it leaves open: who needs the same Adam moments on every rank?
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerolab.practice.adamw import AdamW, AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.meter import label
from zerolab.practice.precision import precision_of
from zerolab.practice.sharding import flatten, padded_numel, views


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
        precision = precision_of(recipe)
        params = list(model.parameters())
        shapes = [p.shape for p in params]
        length = padded_numel(sum(p.numel() for p in params), comm.world_size)

        weights = flatten([p.data for p in params], length, torch.float32)
        self.full_params = label(weights.to(precision.working), "parameters")
        self.full_grads = label(torch.zeros_like(self.full_params), "gradients")
        master = label(weights.clone(), "optimizer_states")
        self.adamw = AdamW(master if precision.master_weights else self.full_params, options)

        for param, data, grad in zip(
            params, views(self.full_params, shapes), views(self.full_grads, shapes), strict=True
        ):
            param.data, param.grad = data, grad

    def backward(self, loss: Tensor) -> None:
        """Adds this rank's gradients to `full_grads` (padded numel,); sends nothing."""
        loss.backward()

    @torch.no_grad()
    def step(self) -> None:
        """Averages the gradients over ranks and updates all weights, on every rank alike."""
        self.comm.all_reduce(self.full_grads)
        self.adamw.update(self.full_grads, scale=1 / self.comm.world_size)
        self.full_params.copy_(self.adamw.master)
        self.full_grads.zero_()

    def full_weights(self) -> Tensor:
        """The fp32 weights (padded numel,): this rank's own, since it holds all of them."""
        return self.adamw.master.float()
