"""The factor that gradients are multiplied with before the update: mean, loss scale, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerolab.practice.comm import Comm
from zerolab.practice.guards import GradientOverflow, StepError


def clip_scale(
    comm: Comm, grad_shards: Sequence[Tensor], max_norm: float | None, loss_scale: float | None
) -> float:
    """1/N for the mean over ranks, smaller where the *global* norm of the mean is above max_norm.

    `grad_shards` are this rank's shards of the gradients summed over ranks. Every rank squares
    its own shards and the squares are added up over ranks, both in float64: local norms 3 and 4
    make 5, not 4 and not 7. Padding is zero and adds nothing. Without max_norm nothing is sent.
    A `loss_scale`, which the loss was multiplied by, is divided out again; then the squares are
    added up in any case. If a sum of squares is not finite it is GradientOverflow on all ranks.
    """
    if max_norm is not None and not max_norm > 0:
        raise StepError(f"max_norm is {max_norm}: it must be above 0, or None for any norm.")
    scale = 1 / comm.world_size / (loss_scale or 1)
    if max_norm is None and loss_scale is None:
        return scale
    own = sum(float(shard.double().square().sum()) for shard in grad_shards)
    squares = comm.control_sum(torch.tensor([own], dtype=torch.float64)).item()
    if not math.isfinite(squares):
        where = f" at the loss scale {loss_scale:g}" if loss_scale else ""
        raise GradientOverflow(f"The gradients' norm is not finite{where}; no weight was changed.")
    clipped = 1.0 if max_norm is None else max_norm / (math.sqrt(squares) * scale + 1e-6)
    return scale * min(1.0, clipped)
