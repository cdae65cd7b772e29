"""Two collectives as a ring: every rank sends to its right neighbour alone, and one chunk a round.

They send what `zerolab.practice.comm` sends, (N-1)/N of the full buffer, but in N-1 rounds and to
one neighbour, so that no link is busier than another (Thakur et al. 2005). A ring adds each chunk
up in another order of ranks, the one in which it travels: with floating point that shows in the
last bits, which is why the stages use `comm` and not this file.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_gather(full: Tensor, shard: Tensor, rank: int, world_size: int) -> None:
    """Fills `full` (world_size * n,) with the shards (n,) of ranks 0 to world_size - 1.

    In the k-th round a rank passes on what came in the round before; at first its own shard.
    """
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = full.view(world_size, -1)  # (world_size, n)
    chunks[rank] = shard
    for k in range(world_size - 1):
        sending = dist.isend(chunks[(rank - k) % world_size], right)
        dist.recv(chunks[(rank - k - 1) % world_size], left)
        sending.wait()  # type: ignore[union-attr]


def ring_reduce_scatter(shard: Tensor, full: Tensor, rank: int, world_size: int) -> None:
    """Writes the sum over ranks of chunk `rank` of `full` (world_size * n,) into `shard` (n,).

    A chunk's sum starts to the right of its owner and goes once round the ring; each rank adds its
    own part, and the owner adds the last. `full` is left as it is.
    """
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = full.view(world_size, -1)
    total = chunks[(rank - 1) % world_size]
    for k in range(1, world_size):
        arrived = torch.empty_like(shard)
        sending = dist.isend(total, right)
        dist.recv(arrived, left)
        sending.wait()  # type: ignore[union-attr]
        total = arrived.add_(chunks[(rank - 1 - k) % world_size])
    shard.copy_(total)
