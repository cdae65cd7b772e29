"""Where states and parameters stay below the device: in memory, or in a file that is read by turns.

A store is told of each unit once, at the start; afterwards it hands the units out one by one, and
keeps what was changed.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import torch
from torch import Tensor

from zerolab.practice.adamw import AdamW, AdamWOptions
from zerolab.practice.launcher import rank
from zerolab.practice.statefile import Buffer, StateFile
from zerolab.practice.unit import Unit

IN_MEMORY = ("tmpfs", "ramfs", "rootfs")  # file systems that are no disk


def filesystem(folder: str) -> str:
    """The type of file system that holds a folder, such as ext4; "unknown" where nobody says."""
    found = "unknown"
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        longest = 0
        for line in mounts:
            left, _, right = line.partition(" - ")
            point = left.split()[4]
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:
                longest, found = len(point), right.split()[0]
    return found


def disk_folder(wanted: str | None) -> tuple[str, bool]:
    """A folder on a disk, and whether a file may have a name there.

    That is the world's own folder, which goes with the world. Where it lies in memory, or a
    launcher made the ranks, or another is wanted, the file has no name, and goes with its rank.
    """
    own = rank.folder()
    if wanted is None and own and filesystem(own) not in IN_MEMORY:
        return own, True
    places = [wanted] if wanted else [tempfile.gettempdir(), "/var/tmp"]
    return next((p for p in places if filesystem(p) not in IN_MEMORY), places[0]), False


def open_file(wanted: str | None, what: str, sizes: Sequence[int]) -> StateFile:
    """This rank's file for records of these sizes; `what` they are gives it its name."""
    folder, named = disk_folder(wanted)
    number = rank.namespace()["RANK"]
    names = (f"{folder}/{what.replace(' ', '-')}-{number}-{i}.bin" for i in itertools.count())
    path = next(name for name in names if not os.path.lexists(name))
    if not named:
        descriptor, path = tempfile.mkstemp(".bin", f"zerolab-{number}-", folder)
        os.close(descriptor)
    return StateFile(path, sizes, f"rank {number}'s {what}", named=named)


class _AdamWOver(AdamW):
    """AdamW whose states lie in memory that is lent to it."""

    def __init__(self, states: Sequence[Tensor], options: AdamWOptions, steps: int) -> None:
        self.master, self.momentum, self.variance = states
        self.options, self.steps = options, steps


class AdamWInFile:
    """What stands for a unit's AdamW while its states are in a file; each look at one reads it."""

    def __init__(self, file: StateFile, index: int, options: AdamWOptions, steps: int) -> None:
        self.file, self.index, self.options, self.steps = file, index, options, steps
        self.numel = file.sizes[index] // 12

    def over(self, buffer: Buffer) -> AdamW:
        """AdamW on the states that lie in a buffer."""
        flat = buffer.tensor(torch.float32, 3 * self.numel)
        return _AdamWOver(flat.view(3, -1).unbind(), self.options, self.steps)

    def read(self) -> AdamW:
        """AdamW on a copy of the states in memory of its own."""
        buffer = Buffer(self.file.sizes[self.index])
        self.file.read(self.index, buffer)
        self.file.check(self.index, buffer)
        return self.over(buffer)

    master = property(lambda self: self.read().master)
    momentum = property(lambda self: self.read().momentum)
    variance = property(lambda self: self.read().variance)


class StatesInMemory:
    """Optimizer states in the CPU's memory, all the time."""

    how = "in memory"

    def take(self, unit: Unit) -> None:
        """The unit's states stay where they are."""

    def read(self, unit: Unit) -> AdamW:
        """The unit's states, where they are."""
        return unit.adamw

    def begin(self, units: Sequence[Unit]) -> None:
        """Says that `each` of these units will be asked for."""

    def each(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, AdamW]]:
        """Every unit with its states, of which nobody keeps the one before."""
        for unit in units:
            yield unit, unit.adamw

    def commit(self) -> None:
        """Nothing has to be finished."""

    def close(self) -> None:
        """Nothing is left behind."""


class StatesOnDisk(StatesInMemory):
    """Optimizer states in a file, of which two units are in memory at a time.

    While one buffer is updated, a thread writes the other's unit back and reads the next into it.
    The first two are read in backward (`begin`), as the device does not need this rank's disk.
    """

    def __init__(self, file: StateFile, units: Sequence[Unit]) -> None:
        self.file, self.how = file, f"{file.how}, on {filesystem(file.path)}"
        self.index = {unit: index for index, unit in enumerate(units)}
        self.buffers = [Buffer(max(file.sizes, default=0)) for _ in range(2)]
        self.disk = ThreadPoolExecutor(1, "zerolab-disk")
        self.reads: list[Future[None]] = []
        self.close = weakref.finalize(self, _end, self.disk, file)  # type: ignore[method-assign]

    def take(self, unit: Unit) -> None:
        """Writes the states that a unit has in memory to the file, and lets go of them."""
        wait(self.reads)
        self.reads.clear()  # they took a buffer, and perhaps what is replaced here
        index, adamw, buffer = self.index[unit], unit.adamw, self.buffers[0]
        stand_in = AdamWInFile(self.file, index, adamw.options, adamw.steps)
        there = stand_in.over(buffer)
        for state in ("master", "momentum", "variance"):
            getattr(there, state).copy_(getattr(adamw, state))
        self.file.sign(index, buffer)
        self.file.write(index, buffer)
        unit.adamw = stand_in  # type: ignore[assignment]

    def read(self, unit: Unit) -> AdamW:
        """A copy of a unit's states, in memory until `take` writes it back."""
        return unit.adamw.read()  # type: ignore[attr-defined]

    def begin(self, units: Sequence[Unit]) -> None:
        """Begins to read the first two."""
        if not self.reads:
            self._read(self._turns(units)[:2])

    def _turns(self, units: Sequence[Unit]) -> list[tuple[int, Buffer]]:
        return [(self.index[unit], self.buffers[turn % 2]) for turn, unit in enumerate(units)]

    def _read(self, turns: list[tuple[int, Buffer]]) -> None:
        self.reads += [self.disk.submit(self.file.read, *turn) for turn in turns]

    def each(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, AdamW]]:
        """Every unit with its states, which are written back when the caller asks for the next."""
        self.begin(units)
        turns = self._turns(units)
        writes: list[Future[None]] = []
        try:
            for number, unit in enumerate(units):
                self.reads[number].result()
                index, buffer = turns[number]
                self.file.check(index, buffer)
                adamw = unit.adamw.over(buffer)  # type: ignore[attr-defined]
                yield unit, adamw
                unit.adamw.steps = adamw.steps
                self.file.sign(index, buffer)
                writes.append(self.disk.submit(self.file.write, index, buffer))
                self._read(turns[number + 2 : number + 3])
            for write in writes:
                write.result()
            self.commit()
        finally:
            wait([*self.reads, *writes])  # nobody moves a buffer's bytes once this is left
            self.reads.clear()

    def commit(self) -> None:
        """From here on the file holds what was written since the last time."""
        self.file.commit()


def _end(disk: ThreadPoolExecutor, file: StateFile) -> None:
    disk.shutdown()  # a read may still be on its way
    file.close()


class ParamsInMemory:
    """Parameter shards in the CPU's memory."""

    how = "in memory"

    def take(self, unit: Unit) -> None:
        """The shard stays where it is."""

    def fetch(self, shard: Tensor) -> Tensor:
        """A unit's `param_shard`, for a copy to the device."""
        return shard

    def keep(self, shard: Tensor, values: Tensor) -> None:
        """New values of a unit's `param_shard`."""
        shard.copy_(values)

    def commit(self) -> None:
        """Nothing has to be finished."""

    def close(self) -> None:
        """Nothing is left behind."""


class ParamsOnDisk(ParamsInMemory):
    """Parameter shards in a file; a unit's `param_shard` has a length, and no memory."""

    def __init__(self, file: StateFile, units: Sequence[Unit]) -> None:
        self.file, self.how = file, f"{file.how}, on {filesystem(file.path)}"
        self.units, self.index = list(units), dict[int, int]()
        self.buffer = Buffer(max(file.sizes))
        self.close = weakref.finalize(self, file.close)  # type: ignore[method-assign]

    def take(self, unit: Unit) -> None:
        """Writes a new unit's shard to the file, and frees its memory."""
        self.index[id(unit.param_shard)] = self.units.index(unit)
        self.keep(unit.param_shard, unit.param_shard)
        unit.param_shard.untyped_storage().resize_(0)

    def fetch(self, shard: Tensor) -> Tensor:
        """Reads a shard; it is there until the next one is read or kept."""
        index = self.index[id(shard)]
        self.file.read(index, self.buffer)
        self.file.check(index, self.buffer)
        return self._there(shard)

    def keep(self, shard: Tensor, values: Tensor) -> None:
        """Writes a shard's new values."""
        self._there(shard).copy_(values)
        index = self.index[id(shard)]
        self.file.sign(index, self.buffer)
        self.file.write(index, self.buffer)

    def commit(self) -> None:
        """From here on the file holds what was written since the last time."""
        self.file.commit()

    def _there(self, shard: Tensor) -> Tensor:
        return self.buffer.tensor(shard.dtype, shard.numel())
