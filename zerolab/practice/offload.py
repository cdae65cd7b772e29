"""Optimizer states below the device: in the CPU's memory, or in a file on disk.

The device keeps what forward and backward need. A step sends each rank's gradients down, has the
CPU update the states there, and brings the new working parameters up: 2 + 2 bytes of each of the
rank's elements cross, and 12 stay below (ZeRO-Offload, arXiv 2101.06840, section 3). At stage 3
the parameters may live below too, and then come up for each gather (ZeRO-Infinity, 2104.07857).
The bits are those of the stage without offload, but for the schedule "delayed", which says what
it computes instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from zerolab.practice.adamw import AdamW, AdamWOptions
from zerolab.practice.comm import Comm, Finish
from zerolab.practice.gathering import ParameterGathering
from zerolab.practice.guards import expect_loss
from zerolab.practice.meter import label
from zerolab.practice.norm import clip_scale
from zerolab.practice.precision import precision_of
from zerolab.practice.reduction import GradientReduction
from zerolab.practice.sharding import shard_of, views
from zerolab.practice.statefile import StateFile
from zerolab.practice.stores import (
    ParamsInMemory,
    ParamsOnDisk,
    StatesInMemory,
    StatesOnDisk,
    open_file,
)
from zerolab.practice.tiers import cpu_empty, down, on_cpu, put, tier_of, up
from zerolab.practice.unit import Unit, all_units, make_units, modules_of

CHOICES = {
    "optimizer": ("cpu", "disk"),
    "parameters": ("device", "cpu", "disk"),
    "schedule": ("plain", "stream", "delayed"),
}


@dataclass(frozen=True)
class Offload:
    """What lives where, and when it moves.

    plain    a step brings one unit's gradients down, updates it, brings its parameters up, then
             the next unit
    stream   gradients go down in backward, as soon as a unit's are summed; the device keeps none
    delayed  the CPU updates while the next forward and backward run, one step late
    `folder` is where the files of "disk" go; None is the world's own.
    """

    optimizer: str = "cpu"
    parameters: str = "device"
    schedule: str = "plain"
    folder: str | None = None

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                given = f"{name}={getattr(self, name)}"
                raise ValueError(f"--offload {given} is not one of {', '.join(known)}.")
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ValueError(f"--offload-folder {self.folder} is no folder: make it first.")
        if self.folder is not None and not os.access(self.folder, os.W_OK):
            raise ValueError(f"--offload-folder {self.folder} is not writable: name another one.")

    @classmethod
    def read(cls, text: str) -> Offload:
        """From "optimizer=disk,schedule=stream"; ValueError in one sentence for anything else."""
        given = [part.partition("=")[::2] for part in text.replace(" ", "").split(",")]
        parts = dict(given)
        if len(parts) < len(given):
            raise ValueError("--offload names something twice: give each one value.")
        if unknown := [name for name in parts if name not in CHOICES]:
            known = f"{', '.join(CHOICES)}, as in optimizer=disk,schedule=stream"
            raise ValueError(f"--offload knows {known}; {unknown[0]!r} is not among them.")
        return cls(**parts)

    def check(self, stage: int, recipe: str) -> None:
        """ValueError where a stage or a recipe has nothing to put below."""
        if stage not in (1, 2, 3):
            raise ValueError(f"Offload needs stage 1, 2 or 3, not {stage}: stage 0 shards nothing.")
        if self.parameters != "device" and stage < 3:
            raise ValueError("Parameter offload needs stage 3: below it each rank uses them whole.")
        if self.schedule == "stream" and stage < 2:
            raise ValueError("Gradients stream at stage 2 or 3; stage 1 sums them in the step.")
        if not precision_of(recipe).master_weights:
            raise ValueError(
                f"The recipe {recipe} has no master weights to update below: take adamw-mixed."
            )


class Offloaded:
    """A model at stage 1, 2 or 3 with its optimizer states, and perhaps parameters, below.

    Make the model inside `tiers.on_cpu()`: its first weights then never lie on the device. Each
    rank holds on the device what its stage holds there but for the states, 2 + 2/N bytes at stage
    2 in place of 2 + 14/N, and with "stream" no gradients between two backward passes, 2 bytes.
    `close` removes the files; the end of the world does too.
    """

    def __init__(
        self,
        stage: int,
        model: nn.Module,
        comm: Comm,
        options: AdamWOptions | None = None,
        recipe: str = "adamw-mixed",
        offload: Offload | None = None,
        overlap: bool = False,
        prefetch: bool = False,
    ) -> None:
        self.offload = offload or Offload()
        self.offload.check(stage, recipe)
        self.stage, self.model, self.comm = stage, model, comm
        modules = modules_of(model) if stage > 1 else [model]
        with on_cpu():
            self.needs = make_units(model, modules, comm, precision_of(recipe))
            self.units = all_units(self.needs)
            self._make_stores()
            for unit in self.units:
                unit.own(comm.world_size, comm.rank, options, apart=stage == 3)
                self._settle(unit)
        self.states.commit()
        self.params.commit()
        if stage > 1:
            self.reduction = GradientReduction(self.units, comm, overlap)
            if self.offload.schedule == "stream":
                self.reduction.keep = keep_below
        if stage == 3:
            gathers = FromBelow(comm, self.params) if self.offload.parameters != "device" else comm
            self.gathering = ParameterGathering(model, self.needs, gathers, prefetch)
            self.reduction.after_unit = self.gathering.free
        self._cpu = ThreadPoolExecutor(1, "zerolab-cpu-optimizer")
        self._late: Future[None] | None = None
        self.broken = ""

    def _make_stores(self) -> None:
        """Memory or files for states and parameters, and room for what crosses."""
        n, where, p = self.comm.world_size, self.offload, self.units[0].precision
        trainable = self._trainable()
        self.states, self.params = StatesInMemory(), ParamsInMemory()
        if where.optimizer == "disk":
            sizes = [12 * (unit.padded // n) for unit in trainable]
            file = open_file(where.folder, "optimizer states", sizes)
            self.states = StatesOnDisk(file, trainable)
        if where.parameters == "disk":
            sizes = [p.working.itemsize * (unit.padded // n) for unit in self.units]
            self.params = ParamsOnDisk(open_file(where.folder, "parameters", sizes), self.units)
        ends = list(accumulate(unit.padded // n for unit in trainable))
        largest = max((unit.padded // n for unit in trainable), default=0)
        late = where.schedule == "delayed"  # then all units' are there at once
        self._start = dict(zip(trainable, [0, *ends], strict=False)) if late else {}
        length = ends[-1] if late else largest
        wide = 0 if p.gradient == torch.float32 else largest
        self._grads = label(cpu_empty(length, p.gradient), "gradients" if late else "temporary")
        self._working = label(cpu_empty(length, p.working), "parameters" if late else "temporary")
        self._wide_grads = label(cpu_empty(wide, torch.float32), "temporary")

    def _room(self, buffer: Tensor, unit: Unit) -> Tensor:
        """A unit's part of a buffer (shard numel,); all units share one, unless it is "delayed"."""
        return buffer[self._start.get(unit, 0) :][: unit.padded // self.comm.world_size]

    def _settle(self, unit: Unit) -> None:
        """Moves what a new unit has to where it belongs; it was made in the CPU's memory."""
        put(unit.full_params, "cpu")
        if self.stage < 3:
            unit.full_params = label(up(unit.full_params), "parameters")
            for param, view in zip(unit.params, views(unit.full_params, unit.shapes), strict=True):
                param.data = view
            unit.param_shard = shard_of(unit.full_params, self.comm.world_size, self.comm.rank)
        else:
            unit.full_params.untyped_storage().resize_(0)
            put(unit.full_params, "device")  # where each gather will fill it
            put(unit.param_shard, "cpu")
            if self.offload.parameters == "device":
                unit.param_shard = label(up(unit.param_shard), "parameters")
            else:
                self.params.take(unit)
        if unit.trainable:
            for state in (unit.adamw.master, unit.adamw.momentum, unit.adamw.variance):
                put(state, "cpu")
            self.states.take(unit)

    def backward(self, loss: Tensor) -> None:
        """As the stage's own; with "stream" each unit's sums go down at once."""
        expect_loss(loss)
        with self._whole_or_broken():
            if self.offload.schedule != "delayed":  # whose update may still be at work
                self.states.begin(self._trainable())
            if self.stage == 3:
                with self.gathering.for_backward():
                    loss.backward()
                    self.reduction.finish()
            else:
                loss.backward()
                if self.stage == 2:
                    self.reduction.finish()

    @torch.no_grad()
    def step(self, max_norm: float | None = None, loss_scale: float | None = None) -> None:
        """Gradients down, states updated below, working parameters up.

        "delayed": what the last step began comes up now, and this step's update begins; it goes
        on below while the device computes the next gradients with parameters that lack it.
        """
        trainable = self._trainable()
        if self.stage == 1:
            for unit in trainable:
                unit.grad_shard = shard_of(unit.grads(), self.comm.world_size, self.comm.rank)
                self.comm.reduce_scatter(unit.grad_shard, unit.grads())
        scale = clip_scale(self.comm, [u.own_grads() for u in trainable], max_norm, loss_scale)
        with self._whole_or_broken():
            if self.offload.schedule == "delayed":
                self._land()
                grads = [self._bring_down(unit) for unit in trainable]
                self._late = self._cpu.submit(self._update_all, trainable, grads, scale)
                return
            updated: Unit | None = None
            for unit, adamw in self.states.each(trainable):
                if updated:  # its states are on their way to the disk by now
                    self._bring_up(updated)
                self._update(unit, adamw, self._bring_down(unit), scale)
                updated = unit
            if updated:
                self._bring_up(updated)
            self.params.commit()

    def finish(self) -> None:
        """After the last step: what is still on its way comes up."""
        with self._whole_or_broken(), torch.no_grad():
            self._land()

    @contextlib.contextmanager
    def opened(self, unit: Unit) -> Iterator[None]:
        """A unit whose states are in memory and may be changed; its parameters then follow them."""
        if not unit.trainable:
            yield
            return
        unit.adamw = self.states.read(unit)
        yield
        self._room(self._working, unit).copy_(unit.adamw.master)
        self.states.take(unit)
        self.states.commit()
        self._bring_up(unit)
        self.params.commit()

    def close(self) -> None:
        """Ends the threads and removes the files; the engine is of no use afterwards."""
        self._cpu.shutdown()
        self.states.close()
        self.params.close()

    @property
    def files(self) -> list[StateFile]:
        """The files on disk, if there are any."""
        stores = (self.states, self.params)
        return [s.file for s in stores if isinstance(s, StatesOnDisk | ParamsOnDisk)]

    def param_shard_of(self, unit: Unit) -> Tensor:
        """This rank's working parameters of a unit, wherever they are (shard numel,)."""
        below = self.offload.parameters != "device"
        return self.params.fetch(unit.param_shard) if below else unit.param_shard

    def _trainable(self) -> list[Unit]:
        return [unit for unit in self.units if unit.trainable]

    def _land(self) -> None:
        if self._late:
            self._late.result()
            self._late = None
            for unit in self._trainable():
                self._bring_up(unit)
            self.params.commit()

    def _bring_down(self, unit: Unit) -> Tensor:
        """A unit's summed gradients in the CPU's memory; the device keeps none."""
        grads = unit.own_grads()
        if tier_of(grads) == "device":
            grads = down(grads, self._room(self._grads, unit))
        unit.grad_shard = None
        if self.stage == 1:
            unit.drop_grads()
        return grads

    def _update(self, unit: Unit, adamw: AdamW, grads: Tensor, scale: float) -> None:
        """The CPU's part; makes nothing but what torch's kernel does, as no meter watches it."""
        if grads.dtype != torch.float32:
            grads = self._wide_grads[: grads.numel()].copy_(grads)
        adamw.update(grads, scale)
        self._room(self._working, unit).copy_(adamw.master)

    def _update_all(self, units: list[Unit], grads: list[Tensor], scale: float) -> None:
        for (unit, adamw), own in zip(self.states.each(units), grads, strict=True):
            self._update(unit, adamw, own, scale)

    def _bring_up(self, unit: Unit) -> None:
        """New working parameters, to the device and there to all ranks, or to where they stay."""
        working = self._room(self._working, unit)
        if self.offload.parameters == "device":
            unit.param_shard.copy_(working)
        else:
            self.params.keep(unit.param_shard, working)
        if self.stage < 3:
            self.comm.all_gather(unit.full_params, unit.param_shard)

    @contextlib.contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        """A step that broke off may have updated some units: none is used after it."""
        if self.broken:
            raise RuntimeError(
                f"A step broke off, and this engine is of no use any more ({self.broken}). Make a "
                "new one, and go on from the last checkpoint."
            )
        try:
            yield
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise


def keep_below(unit: Unit, sums: Tensor) -> None:
    """Copies a unit's sums down and lets go of them; an earlier micro-batch's wait there."""
    came_down = label(down(sums), "gradients")
    if unit.grad_shard is None:
        unit.grad_shard = came_down
    else:
        unit.grad_shard.add_(came_down)


class FromBelow(Comm):
    """Gathers shards that lie below the device: each comes up first."""

    def __init__(self, comm: Comm, params: ParamsInMemory) -> None:
        super().__init__(comm.native)
        self.params = params

    def start_all_gather(self, full: Tensor, shard: Tensor) -> Finish:
        """Begins with a copy of the shard to the device, which lives until all have arrived."""
        came_up = [label(up(self.params.fetch(shard)), "temporary")]
        arrived = super().start_all_gather(full, came_up[0])

        def finish() -> None:
            arrived()
            came_up.clear()

        return finish
