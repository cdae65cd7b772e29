"""Two tiers of memory on one machine: the toy device, and the CPU's memory below it.

Both are ordinary tensors here, told apart by a mark on their storage. The meter passes the mark
on from an operation's inputs to its results, refuses what mixes the two, as a real device does,
and books each copy from one to the other. So no byte crosses the edge unseen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

TIERS = ("device", "cpu")

_new = ["device"]  # where tensors are made that have no tensor to come from


class TierError(RuntimeError):
    """An operation on tensors of two tiers; one of them must be copied across first."""


def tier_of(tensor: Tensor) -> str:
    """Returns "device", unless the storage was marked."""
    return getattr(tensor.untyped_storage(), "zerolab_tier", "device")


def put(tensor: Tensor, tier: str) -> Tensor:
    """Marks a tensor's storage, moving nothing; returns the tensor."""
    tensor.untyped_storage().zerolab_tier = tier  # type: ignore[attr-defined]
    return tensor


@contextlib.contextmanager
def _made_in(tier: str) -> Iterator[None]:
    before, _new[0] = _new[0], tier
    try:
        yield
    finally:
        _new[0] = before


def on_cpu() -> contextlib.AbstractContextManager[None]:
    """What is made inside, out of no other tensor, is in the CPU's memory (while a meter is on)."""
    return _made_in("cpu")


def cpu_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """An unwritten tensor (numel,) in the CPU's memory."""
    with on_cpu():
        return put(torch.empty(numel, dtype=dtype), "cpu")


def down(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies a flat tensor of the device into the CPU's memory, into `out` where it is given."""
    below = cpu_empty(tensor.numel(), tensor.dtype) if out is None else out[: tensor.numel()]
    return below.copy_(tensor)


def up(tensor: Tensor) -> Tensor:
    """Copies a flat tensor of the CPU's memory to the device; returns the new one."""
    with _made_in("device"):
        return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor)


def inherit(tensors: list[Tensor], result: Tensor) -> None:
    """Marks a result that is new: as its inputs are, or as `on_cpu` says where it has none."""
    flat = [t for t in tensors if t.dim() > 0]
    if "cpu" in ({tier_of(t) for t in flat or tensors} or _new):
        put(result, "cpu")


def crossing(name: str, tensors: list[Tensor], args: Any) -> tuple[str, int] | None:
    """What an operation moves over the edge: "down" or "up" and bytes; None for nothing.

    TierError for all but a copy. A tensor of one number may be read from either side.
    """
    if len({tier_of(t) for t in tensors if t.dim() > 0}) < 2:
        return None
    if name != "aten::copy_":
        raise TierError(f"{name} mixes tensors of the device and of the CPU: copy one across first")
    to, source = args[0], args[1]
    if to.dtype != source.dtype:
        raise TierError(f"a copy from {source.dtype} to {to.dtype} across the edge: convert first")
    return "down" if tier_of(to) == "cpu" else "up", source.numel() * source.element_size()
