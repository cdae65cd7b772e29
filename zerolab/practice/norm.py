"""The factor that gradients are multiplied with before the update: the mean, and clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerolab.practice.comm import Comm


def clip_scale(comm: Comm, grad_shards: Sequence[Tensor], max_norm: float | None) -> float:
    """1/N for the mean over ranks, smaller where the *global* norm of the mean is above max_norm.

    `grad_shards` are this rank's shards of the gradients summed over ranks. Every rank squares
    its own shards and the squares are added up over ranks, both in float64: local norms 3 and 4
    make 5, not 4 and not 7. Padding is zero and adds nothing. Without max_norm nothing is sent.
    """
    scale = 1 / comm.world_size
    if max_norm is None:
        return scale
    own = sum(float(shard.double().square().sum()) for shard in grad_shards)
    squares = torch.tensor([own], dtype=torch.float64)
    norm = math.sqrt(comm.control_sum(squares).item()) * scale
    return scale * min(1.0, max_norm / (norm + 1e-6))
