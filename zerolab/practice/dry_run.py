"""A step of a model that no laptop holds, on one of a thousand ranks that are not there.

Tensors have shapes and no memory: the stages' lie on torch's meta device, and fully_shard's, which
must lie on a CPU, are torch's fake tensors, slower by far. The process group sends nothing (torch's
"fake" backend). The code is the real one: the stages', or fully_shard's. The meter counts what it
would hold and what it hands over, from the sizes of the very buffers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.practice.architectures import Architecture, Decoder
from zerolab.practice.comm import Comm, Finish, sum_in_rank_order
from zerolab.practice.gpt import num_parameters
from zerolab.practice.measure import STAGES
from zerolab.practice.meter import (
    Meter,
    hear_resizes,
    label,
    sending_as,
    tensors_in,
    watching,
    young_garbage,
)
from zerolab.practice.nowhere import AS_ON_A_CPU, EqualPieces, fake_group, fake_tensors, nowhere
from zerolab.practice.peers import Peer, fsdp2
from zerolab.practice.sharding import padded_numel, shard_of, shard_range

DRY_PEERS = {"fsdp2": True, "fsdp2-no-reshard": False}
"""Peers that run without memory, and whether they free parameters after forward."""


@dataclass(frozen=True)
class DryJob:
    """What to run: a stage, or a peer where one is named, as `rank` of `ranks`.

    Each rank has `micro_batches` of one sequence of `tokens`. With `recompute` the blocks keep
    their inputs alone. `engine` are keyword arguments of the stage, such as overlap.
    """

    model: Architecture
    ranks: int
    stage: int = 3
    peer: str | None = None
    rank: int = 0
    recipe: str = "adamw-mixed"
    tokens: int = 128
    micro_batches: int = 1
    recompute: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DryCount:
    """What one rank would count; bytes. Names as in `zerolab.practice.measure.Count`.

    units          parameters of each unit that is padded on its own; none for a peer
    padding        elements that are there so that shards are equal, over all ranks
    empty_shards   units (a peer: parameters) of which the last rank owns no element
    shapes         of all parameters, each once
    peak_by_kind   what the peak was made of, in torch's own words where `peak_by` is torch's
    modules        the peak inside each unit's forward and backward, by "name, phase"
    """

    rank: int
    params: int
    units: list[int]
    padding: int
    empty_shards: int
    shapes: list[tuple[int, ...]]
    held: dict[str, int]
    sent: dict[str, int]
    peak: int
    peak_by_kind: dict[str, int]
    peak_by: str
    modules: dict[str, int]


_DEVICE = torch.ops.prim.device.default  # where is this tensor?


class OneBookingComm(Comm):
    """Hands over the buffers of a Comm in one booking, where a Comm makes 2(N-1) transfers.

    What is allocated and what is booked are the same, for the same tensors of the same sizes: a
    test compares the two. Nothing arrives, so there are no values.
    """

    def start_reduce_scatter(self, shard: Tensor, full: Tensor) -> Finish:
        self._same_length(shard, full)
        own = shard_of(full, self.world_size, self.rank)
        arriving = label(full.new_empty(full.numel() - own.numel()), "temporary")
        self._hand_over("reduce_scatter", full.nbytes - own.nbytes)

        def finish() -> None:
            nonlocal arriving
            starts = range(0, arriving.numel(), own.numel())[:2]
            parts = [arriving[at : at + own.numel()] for at in starts]
            sum_in_rank_order([own, *parts], out=shard)  # more parts need no more memory
            arriving = own

        return finish

    def start_all_gather(self, full: Tensor, shard: Tensor) -> Finish:
        self._same_length(shard, full)
        shard_of(full, self.world_size, self.rank).copy_(shard)
        self._hand_over("all_gather", (self.world_size - 1) * shard.nbytes)
        return lambda: None

    def _hand_over(self, collective: str, num_bytes: int) -> None:
        with sending_as(collective):
            for meter in watching():
                meter.sent[meter.sending or collective] += num_bytes


class ModuleMeter(Meter):
    """A meter of fake tensors that keeps the peak of each phase besides that of all."""

    def __init__(self) -> None:
        super().__init__(fakes=True)
        self.phase = "before forward"
        self.peaks: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # two of three operations; the fake mode takes longer
        if func in AS_ON_A_CPU and args[0].is_meta:
            result = AS_ON_A_CPU[func](*args)
            for value in tensors_in((args, result)):
                self.see(value)
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _compare_peak(self) -> None:
        total = self._held.total()
        if total >= self.peak:
            super()._compare_peak()
        if total > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = total

    def watch(self, model: nn.Module) -> None:
        """Makes each unit's forward and backward a phase of its own."""
        names = {module: name for name, module in model.named_modules()}
        for unit in model.units():  # type: ignore[operator]
            name = names[unit]
            unit.register_forward_pre_hook(lambda *_, n=name: self._begin(f"{n}, forward"))
            unit.register_forward_hook(lambda *a, n=name: self._at_backward(a[-1], n))

    def _begin(self, phase: str) -> None:
        if not torch._C._current_graph_task_id() >= 0:  # recomputation belongs to backward
            self.phase = phase

    def _at_backward(self, output: Tensor, name: str) -> None:
        output.register_hook(lambda _: self._begin_backward(name))

    def _begin_backward(self, name: str) -> None:
        self.phase = f"{name}, backward"


def dry_count(job: DryJob) -> DryCount:
    """Runs the job's step and returns what the meter saw; ValueError for what cannot be run."""
    if job.peer is not None and job.peer not in DRY_PEERS:
        names = " or ".join(DRY_PEERS)
        raise ValueError(
            f"The peer {job.peer!r} has no dry run: choose {names}, or measure it on real ranks, "
            "without --dry-run."
        )
    if job.tokens > job.model.context:
        raise ValueError(
            f"{job.tokens:,} tokens are more than {job.model.name} looks back on: give at most "
            f"{job.model.context:,}."
        )
    fakes = fake_tensors() if job.peer else None  # one mode, entered twice
    with fakes or nowhere():
        model = Decoder(job.model, job.recompute)
        params, shapes = num_parameters(model), [tuple(p.shape) for p in model.parameters()]
    if params < job.ranks:
        raise ValueError(f"{job.ranks:,} ranks are more than the {params:,} parameters: use fewer.")
    with fake_group(job.rank, job.ranks), young_garbage():
        if job.peer:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh("cpu", (job.ranks,))  # its list of ranks has memory
        with fakes or nowhere():
            if job.peer:  # made unwatched: fully_shard cuts each parameter in N pieces to keep one
                with EqualPieces():
                    engine: Any = fsdp2(model, reshard=DRY_PEERS[job.peer], mesh=mesh)
            with ModuleMeter() as meter, hear_resizes(meter):
                tracker = None
                if job.peer:
                    _step(engine, job, meter)  # torch's optimizers make states in a first step
                    engine.label_states()
                    tracker = _torch_s_tracker(engine)
                else:
                    comm = OneBookingComm()
                    engine = STAGES[job.stage](model, comm, recipe=job.recipe, **job.engine)
                    if job.stage < 2:  # a step before this has left the memory of its gradients
                        for unit in engine.units:
                            unit._buffer()
                meter.watch(model)
                meter.sent.clear()
                meter.peaks.clear()
                meter.reset_peak()
                with tracker or contextlib.nullcontext():
                    held = _step(engine, job, meter)
        padding, empty = _uneven(engine, job)
        return DryCount(
            rank=job.rank,
            params=params,
            units=[] if job.peer else [unit.numel for unit in engine.units],
            padding=padding,
            empty_shards=empty,
            shapes=shapes,
            held=held,
            sent=meter.sent_bytes(),
            peak=meter.peak,
            peak_by_kind=_by_kind(tracker) if tracker else meter.peak_by_kind,
            peak_by="torch's FSDPMemTracker" if tracker else "zerolab's meter",
            modules=meter.peaks,
        )


def _step(engine: Any, job: DryJob, meter: ModuleMeter) -> dict[str, int]:
    """One step; returns what is held after the last backward."""
    loss_of = engine.loss if job.peer else engine.model.loss
    for _ in range(job.micro_batches):
        tokens = torch.zeros(1, job.tokens, dtype=torch.long)
        loss = loss_of(tokens, tokens)
        engine.backward(loss / job.micro_batches)
        del loss, tokens
    meter.phase = "the optimizer's step"
    if job.peer:
        engine.label_states()
    held = meter.held()
    engine.step()
    return held


def _torch_s_tracker(peer: Peer) -> Any:
    """torch's memory tracker, which knows what FSDP2 holds by kind; None where it has none."""
    try:
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    except ImportError:
        return None
    return FSDPMemTracker(peer.model, peer.optimizer)


def _by_kind(tracker: Any) -> dict[str, int]:
    """Bytes by kind at the tracker's peak; its "Total" is left out."""
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()  # of the one device
    kinds = {getattr(kind, "value", str(kind)): size for kind, size in snapshot.items() if size}
    return {kind: size for kind, size in kinds.items() if kind != "Total"}


def _uneven(engine: Any, job: DryJob) -> tuple[int, int]:
    """Elements of padding over all ranks, and how many shards of the last rank are empty.

    fully_shard cuts each parameter by rows, ceil(rows / N) for each rank as long as there are any.
    """
    last = job.ranks - 1
    if job.peer:
        shapes = [p.shape for p in engine.model.parameters()]
        padding = sum((padded_numel(s[0], job.ranks) - s[0]) * (s.numel() // s[0]) for s in shapes)
        owned = [shard_range(s[0], job.ranks, last) for s in shapes]
    else:
        padding = sum(unit.padded - unit.numel for unit in engine.units)
        owned = [shard_range(unit.numel, job.ranks, last) for unit in engine.units]
    return padding, sum(start == stop for start, stop in owned)
