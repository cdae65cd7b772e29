"""Sends each unit's gradients to their owners while backward goes on (stages 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerolab.practice.comm import Comm
from zerolab.practice.meter import label
from zerolab.practice.unit import Unit


class GradientReduction:
    """Reduce-scatters units in backward order, the last unit of the model first, on every rank.

    A unit goes when its gradients are complete and all later units have gone, so that all ranks
    call the same collectives in the same order, whichever parameters each of them used. With
    `overlap` one reduction is still on its way while backward works on the next unit.
    """

    def __init__(self, units: list[Unit], comm: Comm, overlap: bool) -> None:
        self.comm, self.overlap = comm, overlap
        self.order = [unit for unit in reversed(units) if unit.trainable]
        self.next = 0
        self.pending: Callable[[], None] | None = None
        self.after_unit: Callable[[Unit], None] = lambda unit: None
        self.keep: Callable[[Unit, Tensor], None] = keep
        for unit in self.order:
            unit.on_complete = self.advance

    def advance(self) -> None:
        """Sends the units whose turn has come and whose gradients are complete."""
        while self.next < len(self.order) and not self.order[self.next].missing:
            self._send(self.order[self.next])

    def finish(self) -> None:
        """After backward: sends what is left (units that this pass did not use) and waits."""
        while self.next < len(self.order):
            self._send(self.order[self.next])
        self._wait()
        self.next = 0

    @torch.no_grad()
    def _send(self, unit: Unit) -> None:
        self.next += 1
        self.after_unit(unit)
        self._wait()
        full = unit.grads()
        shard = label(full.new_empty(unit.padded // self.comm.world_size), "gradients")
        arrived = self.comm.start_reduce_scatter(shard, full)
        unit.drop_grads()

        def settle() -> None:
            nonlocal full
            arrived()
            del full
            self.keep(unit, shard)

        self.pending = settle
        if not self.overlap:
            self._wait()

    def _wait(self) -> None:
        if self.pending:
            self.pending()
            self.pending = None


def keep(unit: Unit, sums: Tensor) -> None:
    """Makes a unit's sums over ranks its `grad_shard`, or adds them to an earlier micro-batch's."""
    if unit.grad_shard is None:
        unit.grad_shard = sums
    else:
        unit.grad_shard.add_(sums)
