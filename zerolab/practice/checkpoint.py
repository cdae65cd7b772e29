"""Checkpoints that any stage on any number of ranks can go on from.

On disk there are no stages, ranks or padding: the flat weights, momentum and variance of each
parameter lie there in pieces, each under the parameter's name and where in it the piece starts.
A rank writes what it owns and, unit by unit, reads the pieces that overlap with what it will
own. torch.distributed.checkpoint (DCP) keeps them. Each host must see the same folder. DCP's index
is a pickle, which could run anything: here it may name nothing but what an index is made of.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from zerolab.practice import snapshots
from zerolab.practice.comm import Comm
from zerolab.practice.precision import PRECISIONS
from zerolab.practice.sharding import shard_range
from zerolab.practice.snapshots import CheckpointError
from zerolab.practice.unit import Unit

_DCP = "torch.distributed.checkpoint"
_INDEX_PARTS = {
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata",
                         "MetadataIndex", "StorageMeta", "TensorProperties",
                         "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "torch": {"Size"} | {name for name, it in vars(torch).items() if isinstance(it, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13's
}  # fmt: skip


class _Index(pickle.Unpickler):
    """Reads DCP's index; whatever else a pickle asks for is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_PARTS.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP's reader of a checkpoint that somebody else may have made; it stays in its folder.

    DCP itself loads tensors with weights_only. CheckpointError for an index that is none.
    """

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        index = Path(self.path) / ".metadata"
        try:
            with open(index, "rb") as file:
                metadata = _Index(file).load()
            names = {info.relative_path for info in metadata.storage_data.values()}
            if outside := sorted(name for name in names if Path(name).name != name):
                raise pickle.UnpicklingError(f"it points to {outside[0]}")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:
            raise CheckpointError(
                f"{index} is no index of a checkpoint: {error}. Do not use {self.path}: it was "
                "damaged, or made to do something else."
            ) from None
        return metadata


def save(engine: Any, folder: str | Path, steps: int, about: dict[str, Any]) -> Path:
    """Saves an engine between two steps (call it on all ranks); returns the new folder's path.

    `about` is what else JSON should keep. CheckpointError on all ranks if one cannot write.
    """
    comm, path = engine.comm, Path(folder) / f"step-{steps:08d}"
    first = comm.rank == 0
    partial = next(filter(None, _on_all(lambda: snapshots.begin(path) if first else None)))
    state = {f"random@{comm.rank}": torch.get_rng_state()}
    for unit in engine.units:
        state |= {f"{n}@{start}": values for n, start, values in _pieces(unit, comm, written=True)}
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
    except CheckpointException as error:
        rank, (why, _) = min(error.failures.items())
        raise CheckpointError(f"Rank {rank} cannot write its part of {path}: {why}.") from None
    own = [*partial.glob(f"__{comm.rank}_*"), *([partial / ".metadata"] if first else [])]
    prints = _on_all(lambda: {file.name: snapshots.fingerprint(file) for file in own})
    manifest = _identity(engine) | {
        "steps": steps,
        "updates": max((unit.adamw.steps for unit in engine.units if unit.trainable), default=0),
        "about": about,
        "files": {name: digest for each in prints for name, digest in each.items()},
    }
    _on_all(lambda: snapshots.commit(partial, manifest) if first else None)
    return path


def load(engine: Any, folder: str | Path) -> tuple[int, dict[str, Any]]:
    """Fills an engine of any stage from the last checkpoint; returns its steps and `about`.

    Call it on all ranks, between two steps. Weights, moments, updates and working parameters get
    the saved bits; a rank whose number was there at the save gets its random state too. For what
    is missing, damaged, or another model's: CheckpointError on all ranks, and nothing changes.
    """
    comm = engine.comm
    found = _on_all(lambda: snapshots.verified(Path(folder), comm.rank, comm.world_size))
    path, manifest = found[comm.rank]
    snapshots.compare(path, manifest, _identity(engine))
    saved: dict[str, Any] = {}
    _on_all(lambda: saved.update(Reader(path).read_metadata().state_dict_metadata))
    random = {key: torch.get_rng_state() for key in saved if key == f"random@{comm.rank}"}
    dcp.load(random, storage_reader=Reader(path))
    for state in random.values():
        torch.set_rng_state(state)
    for unit in engine.units:
        with _opened(engine, unit):
            _read(unit, comm, path, saved)
            if unit.trainable:
                unit.adamw.steps = manifest["updates"]
        if unit.full_params.untyped_storage().nbytes() and len(unit.param_shard) < unit.padded:
            comm.all_gather(unit.full_params, unit.param_shard)
        unit.grad_shard = None
        unit.drop_grads()
    return manifest["steps"], manifest["about"]


@contextlib.contextmanager
def _opened(engine: Any, unit: Unit) -> Iterator[None]:
    """A unit whose states are in memory; its working parameters follow them afterwards."""
    if hasattr(engine, "opened"):  # they live below the device
        with engine.opened(unit):
            yield
        return
    yield
    if unit.trainable:
        unit.param_shard.copy_(unit.adamw.master)


def _read(unit: Unit, comm: Comm, path: Path, saved: dict[str, Any]) -> None:
    """Fills this rank's part of a unit from the pieces on disk that overlap with it."""
    own = {name: (start, values) for name, start, values in _pieces(unit, comm)}
    read: dict[str, Tensor] = {}
    copies = []
    for key, piece in saved.items():
        name, _, at = key.rpartition("@")
        if name in own:
            (start, values), begin = own[name], int(at)
            first, last = max(start, begin), min(start + len(values), begin + piece.size.numel())
            if first < last:
                read[key] = torch.empty(piece.size, dtype=values.dtype)
                copies.append((values[first - start : last - start], key, first - begin))
    dcp.load(read, storage_reader=Reader(path))
    for values, key, offset in copies:
        values.copy_(read[key][offset : offset + len(values)])


def _pieces(unit: Unit, comm: Comm, written: bool = False) -> Iterator[tuple[str, int, Tensor]]:
    """What this rank holds of each flat tensor: the tensor's name, where in it, a view of it.

    At stage 0 a rank holds everything; `written` gives the N-th part that it writes.
    """
    flats = {"weights": unit.adamw.master if unit.trainable else unit.param_shard}
    if unit.trainable:
        flats |= {"momentum": unit.adamw.momentum, "variance": unit.adamw.variance}
    start, stop = shard_range(unit.numel, comm.world_size, comm.rank)
    origin = start  # of what the rank holds, in the unit
    if len(unit.param_shard) == unit.padded:
        origin = 0
        start, stop = (start, stop) if written else (0, unit.numel)
    ends = list(accumulate(shape.numel() for shape in unit.shapes))
    for name, begin, end in zip(unit.names, [0, *ends], ends, strict=False):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            for kind, flat in flats.items():
                yield f"{name}.{kind}", first - begin, flat[first - origin : last - origin]


def _identity(engine: Any) -> dict[str, Any]:
    """What a checkpoint and the engine that loads it must have in common."""
    precision = engine.units[0].precision
    parameters = {
        name: f"{list(shape)}{'' if unit.trainable else ' and frozen'}"
        for unit in engine.units
        for name, shape in zip(unit.names, unit.shapes, strict=True)
    }
    recipe = next(name for name, each in PRECISIONS.items() if each == precision)
    return {"recipe": recipe, "parameters": parameters}


def _on_all(action: Callable[[], Any]) -> list[Any]:
    """What the action gave on each rank; if it failed on one, its sentence is raised on all."""
    value, complaint = None, ""
    try:
        value = action()
    except (OSError, ValueError) as error:
        complaint = str(error)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (value, complaint))
    for _, words in told:
        if words:
            raise CheckpointError(words)
    return [given for given, _ in told]
