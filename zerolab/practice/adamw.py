"""AdamW on a flat shard: the optimizer does not care which parameters its elements belong to.

Every element is updated from its own gradient and its own two moments alone. That is why the
states can be cut anywhere, even in the middle of a matrix, and why a shard's update has the
same bits as the same slice of the whole update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolab.practice.meter import label

LANES = 64
"""The fused kernel takes whole vectors of elements, and what is left over one by one, which can
round differently. So that bits do not depend on where a shard ends, the last elements go through
it as a whole vector too; 64 is a multiple of every processor's width."""


@dataclass(frozen=True)
class AdamWOptions:
    """Step size, decay rates of the two moments, the guard against division by 0, weight decay."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


def adamw_by_hand(
    weights: Tensor, grad: Tensor, momentum: Tensor, variance: Tensor, step: int, o: AdamWOptions
) -> None:
    """One AdamW update in place, as the paper writes it (Loshchilov and Hutter, Algorithm 2).

    All four tensors are fp32 and of one shape; `step` counts from 1. Decay is decoupled: it
    shrinks the weights and does not pass through the moments.
    """
    weights.mul_(1 - o.lr * o.weight_decay)
    momentum.mul_(o.beta1).add_(grad, alpha=1 - o.beta1)
    variance.mul_(o.beta2).addcmul_(grad, grad, value=1 - o.beta2)
    unbiased_momentum = momentum / (1 - o.beta1**step)
    unbiased_variance = variance / (1 - o.beta2**step)
    weights.sub_(o.lr * unbiased_momentum / (unbiased_variance.sqrt() + o.eps))


class AdamW:
    """The optimizer states of one flat shard: master weights, momentum and variance, all fp32.

    `master` (shard_numel,) is kept, not copied; a recipe without master weights passes the
    parameters themselves. The update itself is torch's fused kernel, one
    pass over memory; `adamw_by_hand` says what it computes. Every element decays, biases and
    norms too: a flat shard does not know which is which.
    """

    def __init__(self, master: Tensor, options: AdamWOptions | None = None) -> None:
        self.master = master
        self.momentum = label(torch.zeros_like(master), "optimizer_states")
        self.variance = label(torch.zeros_like(master), "optimizer_states")
        self.options, self.steps = options or AdamWOptions(), 0

    @torch.no_grad()
    def update(self, grad_shard: Tensor, scale: float) -> None:
        """One step with the gradient `scale * grad_shard` (shard_numel,), converted to fp32.

        An fp32 `grad_shard` is not copied, and is scaled in place. ValueError for another length.
        """
        if grad_shard.numel() != self.master.numel():
            raise ValueError(
                f"{grad_shard.numel():,} gradients for {self.master.numel():,} weights: the update "
                "of a shard takes the gradients of that shard."
            )
        grad = grad_shard.float()
        if grad is not grad_shard:
            label(grad, "temporary")
        tensors = [self.master, grad, self.momentum, self.variance]
        whole = grad.numel() - grad.numel() % LANES
        self._fused([t[:whole] for t in tensors], scale)
        if whole < grad.numel():
            tails = [t[whole:] for t in tensors]
            padded = [F.pad(tail, (0, LANES - tail.numel())) for tail in tails]
            self._fused(padded, scale)
            for tail, updated in zip(tails, padded, strict=True):
                tail.copy_(updated[: tail.numel()])
        self.steps += 1

    def _fused(self, tensors: list[Tensor], scale: float) -> None:
        master, grad, momentum, variance = ([t] for t in tensors)
        o = self.options
        torch._fused_adamw_(
            master,
            grad,
            momentum,
            variance,
            [],
            [torch.tensor(self.steps + 1.0)],
            amsgrad=False,
            lr=o.lr,
            beta1=o.beta1,
            beta2=o.beta2,
            weight_decay=o.weight_decay,
            eps=o.eps,
            maximize=False,
            grad_scale=torch.tensor(1 / scale),  # the kernel divides by it
            found_inf=torch.tensor(0.0),
        )
