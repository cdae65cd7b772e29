"""Flatten, pad, split and join: the arithmetic of who owns which element.

Pure functions on tensors and integers; nothing here communicates. A flat buffer holds the
parameters of one unit end to end, then zeros (the padding) up to a multiple of the world size,
so that every rank's shard has the same length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def shard_numel(numel: int, world_size: int) -> int:
    """Elements in each rank's shard, padding included: numel / world_size, rounded up."""
    return -(-numel // world_size)


def padded_numel(numel: int, world_size: int) -> int:
    """Elements of the flat buffer: the next multiple of world_size (10 on 4 ranks: 12)."""
    return shard_numel(numel, world_size) * world_size


def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The real elements [start, stop) that a rank owns, padding left out.

    10 elements on 4 ranks: (0, 3), (3, 6), (6, 9), (9, 10). Where there are fewer elements than
    ranks the last ranks own nothing: 2 on 4 gives (0, 1), (1, 2), (2, 2), (2, 2).
    """
    length = shard_numel(numel, world_size)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def flatten(tensors: Iterable[Tensor], length: int, dtype: torch.dtype) -> Tensor:
    """Copies the tensors end to end into one new flat buffer; the rest of it is zero."""
    sources = list(tensors)
    flat = torch.zeros(length, dtype=dtype)
    for part, tensor in zip(views(flat, [t.shape for t in sources]), sources, strict=True):
        part.copy_(tensor)
    return flat


def views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The tensors of the given shapes that lie end to end in a flat buffer; nothing is copied."""
    sizes = [shape.numel() for shape in shapes]
    parts = flat.split([*sizes, flat.numel() - sum(sizes)])  # the last is padding
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]


def shard_of(flat: Tensor, world_size: int, rank: int) -> Tensor:
    """A rank's shard as a view: (padded numel,) -> (padded numel / world_size,)."""
    length = flat.numel() // world_size
    return flat[rank * length : (rank + 1) * length]


def halves(numel: int, world_size: int, lanes: int = 64) -> list[slice]:
    """Two slices of a padded flat buffer, each a multiple of world_size: (0, h), (h, numel).

    Shards of the first half are whole vectors of `lanes` elements, as are those of the second if
    numel allows. A buffer too short for two has one slice.
    """
    half = padded_numel(-(-numel // 2), world_size * lanes)
    return [slice(0, half), slice(half, numel)] if half < numel else [slice(0, numel)]


def join(shards: Sequence[Tensor], numel: int) -> Tensor:
    """The unsharded flat tensor again, padding cut off: the inverse of shard_of on every rank."""
    return torch.cat(list(shards))[:numel]
