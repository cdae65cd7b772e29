"""Counts a stage with offload while it trains: what each tier held, and what crossed the edges."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zerolab.practice import data
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, num_parameters
from zerolab.practice.measure import Job, digest
from zerolab.practice.meter import Meter
from zerolab.practice.offload import Offload, Offloaded
from zerolab.practice.tiers import TIERS, on_cpu


@dataclass(frozen=True)
class OffloadCount:
    """What one rank counted; bytes, and of the last step where it says so.

    units     parameters of each unit that is padded on its own
    held      by tier, by kind: after the last backward, before its step
    peak      the largest sum of live tensors on the device inside the last step
    crossed   "down" to the CPU and "up" from it in the last step
    disk      bytes of the "files", and those "read" and "written" in an average step
    cached    of the files, what the system's page cache held at the end; None if unknown
    sent      bytes handed to other ranks by collective in the last step
    how       how the files are read and written
    digest    of this rank's working parameters at the end, padding left out
    weights   (Ψ,) fp32: the master weights at the end
    """

    params: int
    units: list[int]
    padding: int
    held: dict[str, dict[str, int]]
    peak: int
    crossed: dict[str, int]
    disk: dict[str, int]
    cached: int | None
    sent: dict[str, int]
    how: str
    losses: list[float]
    digest: str
    weights: Tensor


def count_offloaded(job: Job, offload: Offload) -> OffloadCount:
    """Trains on this rank with offload and returns what was counted (call it on all ranks)."""
    comm = Comm()
    torch.manual_seed(comm.rank)
    with Meter() as meter:
        with on_cpu():
            model = GPT(job.model)
        params = num_parameters(model)
        named = list(model.named_parameters())
        engine = Offloaded(job.stage, model, comm, job.options, job.recipe, offload, **job.engine)
        losses, before = [], disk_bytes(engine)
        for step in range(job.steps):
            if step == job.steps - 1:
                meter.reset_peak()
                meter.sent.clear()
                meter.crossed.clear()
            for micro_batch in range(job.micro_batches):
                at = step * job.micro_batches + micro_batch
                loss = model.loss(*data.batch(at, comm.rank, comm.world_size))
                engine.backward(loss / job.micro_batches)
                losses.append(loss.item())
                del loss
            held = {tier: meter.held(tier) for tier in TIERS}
            engine.step(job.max_norm)
            crossed, sent = dict(meter.crossed), meter.sent_bytes()
        peak = meter.peak
        engine.finish()
    moved = disk_bytes(engine)
    weights, working = whole(engine)
    counted = OffloadCount(
        params=params,
        units=[unit.numel for unit in engine.units],
        padding=sum(unit.padded for unit in engine.units) - params,
        held=held,
        peak=peak,
        crossed={way: crossed.get(way, 0) for way in ("down", "up")},
        disk={"files": moved["files"]}
        | {what: (moved[what] - before[what]) // job.steps for what in ("read", "written")},
        cached=cached_bytes(engine),
        sent=sent,
        how=engine.states.how if offload.optimizer == "disk" else engine.params.how,
        losses=losses,
        digest=digest(torch.cat([working[name].flatten() for name, _ in named])),
        weights=torch.cat([weights[name].flatten() for name, _ in named]),
    )
    engine.close()
    return counted


def whole(engine: Offloaded) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every parameter by name: the master weights, and the working parameters of this rank."""
    weights: dict[str, Tensor] = {}
    working: dict[str, Tensor] = {}
    for unit in engine.units:
        own = engine.param_shard_of(unit).clone()
        weights |= unit.whole(unit.adamw.master if unit.trainable else own, engine.comm)
        there = unit.full_params.untyped_storage().nbytes() > 0
        working |= unit.whole(unit.full_params if there else own, engine.comm)
    return {name: tensor.float() for name, tensor in weights.items()}, working


def disk_bytes(engine: Offloaded) -> dict[str, int]:
    """Bytes of an engine's files, and what was read and written since they were made."""
    files = engine.files
    return {
        "files": sum(file.num_bytes for file in files),
        "read": sum(file.read_bytes for file in files),
        "written": sum(file.written_bytes for file in files),
    }


def cached_bytes(engine: Offloaded) -> int | None:
    """What the page cache holds of an engine's files; None where the system does not say."""
    cached = [file.cached_bytes() for file in engine.files]
    return None if None in cached else sum(size or 0 for size in cached)
