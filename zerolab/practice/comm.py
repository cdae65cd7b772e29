"""The three collectives of ZeRO, made of sends, receives and explicit adds in rank order.

Why not torch.distributed's own? Under gloo its reduce-scatter is an all-reduce inside and sends
twice the bytes, and its sums come in an order of its own. Here every shard is the sum over
ranks 0, 1, 2 … in that order, added up in fp32 and rounded once to the shard's dtype: one
process that adds the same tensors in the same order gets the same bits.

This is the only file through which the stages communicate. What is sent is booked by the meter
(`zerolab.practice.meter`), which sees each buffer as it is handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, irecv, isend

from zerolab.practice import toy
from zerolab.practice.meter import label, sending_as
from zerolab.practice.sharding import halves, shard_of

LONG = 2**20
"""Bytes of a tensor that is worth two messages to each rank in place of one."""

Finish = Callable[[], None]


class Comm:
    """This rank's end of the process group: `rank`, `world_size` and the collectives.

    All ranks must call the same collectives in the same order with the same sizes. A "full"
    tensor is flat and its length is world_size times the shard's.

    Under nccl the native collectives are used: they send no more than a ring does, and add in an
    order and a precision of their own. `native` asks for them, or for ours, whatever the backend.
    """

    def __init__(self, native: bool | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.native = dist.get_backend() == "nccl" if native is None else native

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> None:
        """Writes the sum over ranks of this rank's part of `full` into `shard`.

        Before: every rank holds a whole `full` (numel,). After: rank r holds, in `shard`
        (numel / world_size,), the sum of every rank's r-th part. `shard` may be a view of
        `full`. Sends (N-1)/N of full's bytes.
        """
        self.start_reduce_scatter(shard, full)()

    def start_reduce_scatter(self, shard: Tensor, full: Tensor) -> Finish:
        """Begins a reduce-scatter; the call of what it returns waits, and adds up in rank order."""
        self._same_length(shard, full)
        if self.native and self.world_size > 1:
            with sending_as("reduce_scatter"):
                return _waiting(dist.reduce_scatter_single(shard, full, async_op=True))
        parts = {self.rank: shard_of(full, self.world_size, self.rank)}
        ops = []
        for peer in self._peers():
            parts[peer] = label(torch.empty_like(shard), "temporary")
            ops.append(P2POp(isend, shard_of(full, self.world_size, peer), peer))
            ops.append(P2POp(irecv, parts[peer], peer))
        wait = self._exchange(ops, "reduce_scatter")

        def finish() -> None:
            wait()
            sum_in_rank_order([parts[rank] for rank in range(self.world_size)], out=shard)
            parts.clear()

        return finish

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """Fills `full` on every rank with all ranks' shards in rank order.

        Before: rank r holds `shard` (numel / world_size,). After: every rank holds `full`
        (numel,). `shard` may be this rank's part of `full`. Sends N-1 times the shard's bytes.
        """
        self.start_all_gather(full, shard)()

    def start_all_gather(self, full: Tensor, shard: Tensor) -> Finish:
        """Begins an all-gather; the call of what it returns waits for the other ranks' shards."""
        self._same_length(shard, full)
        if self.native and self.world_size > 1:
            with sending_as("all_gather"):
                return _waiting(dist.all_gather_single(full, shard, async_op=True))
        ops = []
        for peer in self._peers():
            ops.append(P2POp(isend, shard, peer))
            ops.append(P2POp(irecv, shard_of(full, self.world_size, peer), peer))
        wait = self._exchange(ops, "all_gather")
        shard_of(full, self.world_size, self.rank).copy_(shard)
        return wait

    def all_reduce(self, full: Tensor) -> None:
        """Replaces `full` by its sum over ranks, on each: a reduce-scatter, then an all-gather.

        Sends 2(N-1)/N of full's bytes, as the ring all-reduce does. More than LONG bytes go in two
        halves, one of which is added up while the other is on its way. ValueError for a length
        that the ranks do not divide.
        """
        n, parts = self.world_size, [full]
        if full.numel() % n:
            raise ValueError(
                f"{full.numel()} elements are no multiple of {n} ranks: is this one rank's shard? "
                "A whole tensor is padded first."
            )
        if full.nbytes > LONG:
            parts = [full[half] for half in halves(full.numel(), n)]
        shards = [shard_of(part, n, self.rank) for part in parts]
        with sending_as("all_reduce"):
            sums = [self.start_reduce_scatter(*both) for both in zip(shards, parts, strict=True)]
            gathers = []
            for summed, part, shard in zip(sums, parts, shards, strict=True):
                summed()
                gathers.append(self.start_all_gather(part, shard))
            for gathered in gathers:
                gathered()

    def control_sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, in rank order, of a few numbers (n,), booked as control."""
        with sending_as("control"):
            every = value.new_empty(self.world_size * value.numel())
            self.all_gather(every, value)
        return sum_in_rank_order(list(every.view(self.world_size, -1)))

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with its neighbour so that no one is besieged."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _exchange(self, ops: list[P2POp], collective: str) -> Finish:
        with sending_as(collective):
            works = dist.batch_isend_irecv(ops) if ops else []
        sent = [op.tensor.nbytes for op in ops if op.op is isend]
        arrives = toy.here.link.take(len(sent), sum(sent)) if toy.here.link else 0.0

        def wait() -> None:
            for work in works:
                work.wait()
            time.sleep(max(0.0, arrives - time.monotonic()) if arrives else 0.0)

        return wait

    def _same_length(self, shard: Tensor, full: Tensor) -> None:
        n, sizes = self.world_size, f"full has {full.numel()} elements, shard {shard.numel()}"
        if shard.numel() > full.numel():
            raise ValueError(f"{sizes}: did you give the two in the other order?")
        if shard.numel() * n != full.numel():
            raise ValueError(f"{sizes}: on {n} ranks full must be {n} shards long. Pad it first.")
        if shard.dtype != full.dtype:
            raise ValueError(f"full is {full.dtype}, shard {shard.dtype}: make them of one dtype.")


def _waiting(work: dist.Work) -> Finish:
    def wait() -> None:
        work.wait()

    return wait


def sum_in_rank_order(parts: list[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of equal-sized tensors, first to last, in fp32 (fp64 stays fp64).

    Returns a new tensor, or `out`, rounded once to its dtype; `out` may be one of the parts.
    """
    *before, last = parts
    wide = torch.promote_types(last.dtype, torch.float32)
    two = len(before) == 1
    if before and out is not None and out.dtype == last.dtype and (two or last.dtype == wide):
        total = before[0] if two else sum_in_rank_order(before)
        return torch.add(total, last, out=out)  # made in fp32 and rounded once, and no copy after
    total = label(parts[0].to(wide, copy=True), "temporary")
    for part in parts[1:]:
        total.add_(part)  # not torch.sum over a stack: its bits depend on how it is sliced
    return total if out is None else out.copy_(total)
