"""What this rank holds and what it sends, counted by watching and not by asking.

Held bytes are the sizes of the live storages of tensors: each storage once, however many views
it has. The meter finds them itself, by looking at what every torch operation takes and returns;
who allocated them has only to say what they are for (`label`). A storage that nobody labelled
is counted as well, under "other", so nothing can be held in secret. What lies in the CPU's
memory, below the device (`zerolab.practice.tiers`), is counted apart, and so is what crosses.

Sent bytes are the sizes of the buffers that are handed to other ranks, taken from the calls of
torch.distributed as they happen. `zerolab.practice.comm` is made of sends and says which
collective they belong to (`sending_as`); a native collective, called by other code, is booked
with the bytes that its ring algorithm sends.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor, UntypedStorage
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from zerolab.practice import tiers
from zerolab.practice.tiers import TIERS
from zerolab.practice.toy import DeviceFull

KINDS = ("parameters", "gradients", "optimizer_states")
"""Kinds of model state. Three more are booked: "gathered" parameters, "temporary", "other"."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
Found = TypeVar("Found")
MANY = 50_000  # objects; to look for garbage among a million takes from 0.1 to 2 seconds
_UPDATE = torch.ops.aten._fused_adamw_.default  # the optimizer's kernel


def label(tensor: Tensor, kind: str) -> Tensor:
    """Says what a tensor's storage is for; returns the tensor.

    `kind` is one of KINDS, "gathered" or "temporary".
    """
    tensor.untyped_storage().zerolab_kind = kind  # type: ignore[attr-defined]
    for meter in watching():
        meter.see(tensor)
    return tensor


@contextlib.contextmanager
def young_garbage() -> Iterator[None]:
    """A collection inside looks only at what came since: torch's half a million objects stay.

    Where most of what was there is set aside already, as on a rank, that is left as it is.
    """
    many = len(gc.get_objects()) > MANY
    if many:
        gc.freeze()
    try:
        yield
    finally:
        if many:
            gc.unfreeze()


def watching() -> list[Meter]:
    """The meters that are on, on this rank."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Meter)]


@contextlib.contextmanager
def sending_as(collective: str) -> Iterator[None]:
    """Books what is sent inside under this collective; the outermost name counts."""
    named = [meter for meter in watching() if meter.sending is None]
    for meter in named:
        meter.sending = collective
        if meter.timeline and collective in ("all_reduce", "reduce_scatter"):
            meter.mark("reduce")
    try:
        yield
    finally:
        for meter in named:
            meter.sending = None


@contextlib.contextmanager
def hear_resizes(meter: Meter) -> Iterator[None]:
    """Tells a meter at once when code that labels nothing resizes a storage, as FSDP does."""
    resize = UntypedStorage.resize_

    def heard(storage: UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if storage._cdata in meter._live:
            meter._count(storage._cdata, storage)
            meter._compare_peak()
        return result

    UntypedStorage.resize_ = heard  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among an operation's arguments, also in lists, tuples and dicts of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def steady(look: Callable[[], Found]) -> Found:
    """What `look` finds five times in a row, 5 ms apart.

    A thread of the process group may hold a collective's buffers a little longer than the call.
    """
    found, times = look(), 1
    while times < 5:
        time.sleep(0.005)
        now = look()
        times = times + 1 if now == found else 1
        found = now
    return found


class Meter(TorchDispatchMode):
    """Counts while it is on: `with Meter() as meter: step(); meter.held()`.

    With a `capacity` it is a toy device as well: DeviceFull, with what it was full of, as soon as
    live bytes exceed it. With `fakes` tensors without memory count with the bytes that they would
    have (`zerolab.practice.dry_run`).

    held    bytes of live storages by kind, now, on the device or in another tier
    peak    the largest total of live bytes on the device so far, and `peak_by_kind` what it was
            made of
    timeline   (name, bytes by kind at its peak) of each part of a step: see `mark`
    crossed bytes copied "down" to the CPU's memory and "up" from it so far
    sent    bytes handed to other ranks so far by collective; "control" for scalars, which are
            not part of any total
    """

    def __init__(self, capacity: int | None = None, fakes: bool = False) -> None:
        super().__init__()
        self.capacity, self.fakes = capacity, fakes
        self.sending: str | None = None
        self._live: dict[int, tuple[weakref.ref[Any], int, str, str]] = {}
        self._tiers: dict[str, Counter[str]] = {tier: Counter() for tier in TIERS}
        self._held = self._tiers["device"]
        self.crossed: Counter[str] = Counter()
        self.peak = 0
        self.peak_by_kind: dict[str, int] = {}
        self.timeline: list[tuple[str, dict[str, int]]] = []
        self._part_peak = 0
        self.sent: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; torch's guard against that would first import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return func(*args, **(kwargs or {}))
        tensors = tensors_in(args, *(kwargs or {}).values())
        name = func._schema.name
        moved = tiers.crossing(name, tensors, args)
        result = func(*args, **(kwargs or {}))
        if moved:
            self.crossed[moved[0]] += moved[1]
        if func.namespace == "c10d":
            self._book(name.split("::")[1], args)
        elif func is _UPDATE and self.timeline and self.timeline[-1][0] != "update":
            self.mark("update")
        results = tensors_in(result)
        for value in results:
            if value.untyped_storage()._cdata not in self._live:
                tiers.inherit(tensors, value)
        for value in (*tensors, *results):
            self.see(value)
        return result

    def see(self, tensor: Tensor) -> None:
        """Looks at a tensor's storage: is it new, has it another size or another label?"""
        if is_traceable_wrapper_subclass(tensor):  # a DTensor: what it holds is inside
            for name in tensor.__tensor_flatten__()[0]:
                if isinstance(inner := getattr(tensor, name), Tensor):  # not its device mesh
                    self.see(inner)
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" and not self.fakes:  # such as DTensor plans with
            return
        key = storage._cdata
        if key not in self._live:
            weakref.finalize(storage, self._forget, key).atexit = False
        self._count(key, storage)
        self._compare_peak()

    def held(self, tier: str = "device") -> dict[str, int]:
        """Bytes that live now in a tier: every kind, and their "total"."""
        for key, (reference, *_) in list(self._live.items()):
            storage = reference()
            if storage is not None:
                self._count(key, storage)
        found = self._tiers[tier]
        held = {kind: found[kind] for kind in (*KINDS, "gathered", "temporary", "other")}
        return held | {"total": sum(held.values())}

    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent so far by collective, their "total", and "control" beside it."""
        names = [*COLLECTIVES, *sorted(set(self.sent) - {*COLLECTIVES, "control"})]
        sent = {name: self.sent[name] for name in names}
        return sent | {"total": sum(sent.values()), "control": self.sent["control"]}

    def reset_peak(self) -> None:
        """Starts the search for the peak, and the timeline, anew from what lives now."""
        self.peak, self.peak_by_kind, self.timeline = 0, {}, []
        self.held()
        self._compare_peak()

    def mark(self, name: str) -> None:
        """Begins a part of the timeline, which goes on to the next mark.

        After a first mark the meter sets more, by watching: "reduce" where gradients begin to be
        reduced, "update" where the optimizer begins.
        """
        self.timeline.append((name, {}))
        self._part_peak = 0
        self.held()
        self._compare_peak()

    def _count(self, key: int, storage: Any) -> None:
        size, kind = storage.nbytes(), getattr(storage, "zerolab_kind", "other")
        tier = getattr(storage, "zerolab_tier", "device")
        _, old_size, old_kind, old_tier = self._live.get(key, (None, 0, kind, tier))
        self._tiers[old_tier][old_kind] -= old_size  # resized, labelled or marked since last seen
        self._tiers[tier][kind] += size
        self._live[key] = (weakref.ref(storage), size, kind, tier)

    def _forget(self, key: int) -> None:
        _, size, kind, tier = self._live.pop(key, (None, 0, "other", "device"))
        self._tiers[tier][kind] -= size

    def _compare_peak(self) -> None:
        total = self._held.total()
        if self.capacity is not None and total > self.capacity:
            made_of = ", ".join(f"{kind.replace('_', ' ')} {size:,}" for kind, size in
                                self._held.most_common() if size)  # fmt: skip
            raise DeviceFull(
                f"out of memory on the toy device: {total:,} bytes are needed and it has "
                f"{self.capacity:,}; at this moment: {made_of}"
            )
        if total >= self.peak:  # equal, too: a label may have come
            self.peak, self.peak_by_kind = total, self._by_kind()
        if self.timeline and total >= self._part_peak:
            self._part_peak, self.timeline[-1] = total, (self.timeline[-1][0], self._by_kind())

    def _by_kind(self) -> dict[str, int]:
        return {kind: size for kind, size in self._held.items() if size}

    def _book(self, op: str, args: Any) -> None:
        if op not in _NATIVE:
            return
        collective, handed = _NATIVE[op]
        tensors = tensors_in(args)
        largest = max((t.numel() * t.element_size() for t in tensors), default=0)
        total = sum(t.numel() * t.element_size() for t in tensors)
        bytes_sent = handed(largest, total, _group_size(args))
        self.sent[self.sending or collective] += bytes_sent


def _group_size(args: Any) -> int:
    """How many ranks take part in a call of torch.distributed: not always all of them."""
    for value in args:
        if isinstance(value, ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    return dist.get_world_size()


def _of_each(largest: int, total: int, n: int) -> int:
    """For lists of tensors: all of them, of each N parts and the one that this rank has or gets."""
    return total * (n - 1) // (n + 1)


# What one rank hands to others in a call of torch.distributed, from the largest tensor among the
# call's arguments (the unsharded one), all tensors together, and the number of ranks; the average
# over ranks where one of them is the root.
_NATIVE: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "send": ("send", lambda largest, total, n: largest),
    "broadcast_": ("broadcast", lambda largest, total, n: largest * (n - 1) // n),
    "reduce_": ("reduce", lambda largest, total, n: largest * (n - 1) // n),
    "allreduce_": ("all_reduce", lambda largest, total, n: 2 * total * (n - 1) // n),
    "allreduce_coalesced_": ("all_reduce", lambda largest, total, n: 2 * total * (n - 1) // n),
    "_reduce_scatter_base_": ("reduce_scatter", lambda largest, total, n: largest * (n - 1) // n),
    "_allgather_base_": ("all_gather", lambda largest, total, n: largest * (n - 1) // n),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _of_each),
    "allgather_into_tensor_coalesced_": ("all_gather", _of_each),
    "reduce_scatter_": ("reduce_scatter", lambda largest, total, n: largest * (n - 1)),
    "allgather_": ("all_gather", lambda largest, total, n: largest * (n - 1)),
    "alltoall_base_": ("all_to_all", lambda largest, total, n: largest * (n - 1) // n),
    "alltoall_": ("all_to_all", lambda largest, total, n: total // 2 * (n - 1) // n),
}


def loopback_bytes() -> int | None:
    """Bytes that the operating system has put on this network namespace's loopback so far.

    None where there is no such counter (macOS, Windows). Counts the ranks of every world that
    shares the namespace, and packet headers too (about 0.1 % of large messages).
    """
    try:
        with open("/proc/net/dev", encoding="ascii") as table:
            for line in table:
                name, _, counters = line.partition(":")
                if name.strip() == "lo":
                    return int(counters.split()[0])
    except OSError:
        pass
    return None
