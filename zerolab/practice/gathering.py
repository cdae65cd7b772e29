"""Brings a unit's parameters together before they are needed, and frees them after (stage 3).

The module's own hooks say when that is: before and after its forward, and when the gradient of
its output arrives, which is when its backward begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerolab.practice.comm import Comm
from zerolab.practice.meter import label
from zerolab.practice.unit import Unit


class ParameterGathering:
    """Gathers and frees the units that each module needs; a rank keeps `param_shard` alone.

    A unit that a later module shares (tied weights) stays from the first use to the last. With
    `prefetch` the next module's units are on their way while a module computes.
    """

    def __init__(
        self,
        model: nn.Module,
        needs: dict[nn.Module, list[Unit]],
        comm: Comm,
        prefetch: bool = False,
    ) -> None:
        self.comm, self.prefetch, self.in_backward = comm, prefetch, False
        self.modules, self.needs = list(needs), list(needs.values())
        self.uses = {
            unit: [place for place, units in enumerate(self.needs) if unit in units]
            for units in self.needs
            for unit in units
        }
        self.arriving: dict[Unit, Callable[[], None]] = {}
        self.whole: set[Unit] = set()
        self.ran, self.group = set[int](), dist.group.WORLD
        self.followed: set[int] = set()  # modules that backward has reason to visit
        model.register_forward_pre_hook(lambda *_: self.ran.clear())
        for place, module in enumerate(self.modules):
            module.register_forward_pre_hook(lambda *_, place=place: self._before_forward(place))
            module.register_forward_hook(lambda *a, place=place: self._after_forward(place, a[-1]))

    def free(self, unit: Unit) -> None:
        """Gives the memory of a unit's whole parameters back; its shard remains."""
        if unit in self.whole:
            self.whole.discard(unit)
            with contextlib.suppress(KeyError, RuntimeError):  # it may still arrive, for nobody
                self.arriving.pop(unit)()
            unit.free_params()

    @contextlib.contextmanager
    def for_backward(self) -> Iterator[None]:
        """While backward runs: forward passes inside are recomputation, and free nothing."""
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            for unit in list(self.whole):
                self.free(unit)

    def _before_forward(self, place: int) -> None:
        if not self.in_backward:
            if not self.ran and self.group is not dist.group.WORLD:
                self.arriving.clear()  # never will: the ranks have formed their group anew
            for unit in () if self.ran else list(self.whole):  # left by a pass that was torn off
                self.free(unit)
            if place in self.ran:
                raise RuntimeError(
                    f"The module number {place} of model.units() ran twice in one forward pass: "
                    "stage 3 frees a unit after its first use. Make each use a unit of its own."
                )
            self.ran.add(place)
        self._bring(place, -1 if self.in_backward else place + 1)

    def _after_forward(self, place: int, output: Any) -> None:
        if self.in_backward:
            return
        for unit in self.needs[place]:
            if self.uses[unit][-1] == place:
                self.free(unit)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self.followed.add(place)
                tensor.register_hook(lambda _: self._before_backward(place))

    def _before_backward(self, place: int) -> None:
        for unit in list(self.whole):  # frozen units complete no gradients, which would free them
            if self.uses[unit][0] > place:
                self.free(unit)
        self._bring(place, place - 1 if place - 1 in self.followed else -1)

    @torch.no_grad()
    def _bring(self, place: int, following: int) -> None:
        for unit in self.needs[place]:
            self._start(unit)
        for unit in self.needs[place]:
            if unit in self.arriving:
                self.arriving.pop(unit)()
        if self.prefetch and 0 <= following < len(self.needs):
            for unit in self.needs[following]:
                self._start(unit)

    def _start(self, unit: Unit) -> None:
        if unit in self.whole:
            return
        self.whole.add(unit)
        self.group = dist.group.WORLD
        unit.full_params.untyped_storage().resize_(unit.full_params.nbytes)
        label(unit.full_params, "gathered")
        self.arriving[unit] = self.comm.start_all_gather(unit.full_params, unit.param_shard)
