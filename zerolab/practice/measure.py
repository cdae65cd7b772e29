"""Counts a stage while it trains: what each rank held and sent, and what became of the weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.practice import data
from zerolab.practice.adamw import AdamW, AdamWOptions
from zerolab.practice.comm import Comm, sum_in_rank_order
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.meter import Meter, loopback_bytes
from zerolab.practice.precision import precision_of
from zerolab.practice.sharding import flatten, views
from zerolab.practice.stage0 import Stage0
from zerolab.practice.stage1 import Stage1

STAGES: dict[int, Any] = {0: Stage0, 1: Stage1}


@dataclass(frozen=True)
class Job:
    """What to train: a stage, a recipe, a model, and for how many optimizer steps."""

    stage: int
    recipe: str = "adamw-mixed"
    model: GPTConfig = field(default_factory=GPTConfig)
    steps: int = 10
    options: AdamWOptions = field(default_factory=AdamWOptions)


@dataclass(frozen=True)
class Count:
    """What one rank counted; bytes, and per step where it says so.

    held        persistent bytes by kind after the last backward and before its step
    peak        the largest sum of live tensor bytes inside the last step
    sent        bytes handed to other ranks by collective, in the last step
    wire        bytes that the loopback carried in an average step, for all ranks together;
                None where the system has no such counter
    losses      this rank's loss at each step
    digest      of this rank's working parameters after the last step, padding left out
    weights     (Ψ,) fp32: the master weights after the last step
    """

    params: int
    padding: int
    held: dict[str, int]
    peak: int
    sent: dict[str, int]
    wire: float | None
    losses: list[float]
    digest: str
    weights: Tensor


def count(job: Job) -> Count:
    """Trains on this rank as the job says and returns what the meter saw (call it on all ranks)."""
    comm = Comm()
    model = GPT(job.model)
    params = num_parameters(model)
    with Meter() as meter:
        engine = STAGES[job.stage](model, comm, job.options, job.recipe)
        losses = []
        before = _loopback_at_rest()
        for step in range(job.steps):
            if step == job.steps - 1:
                meter.reset_peak()
                meter.sent.clear()
            loss = model.loss(*data.batch(step, comm.rank, comm.world_size))
            engine.backward(loss)
            losses.append(loss.item())
            del loss
            held = meter.held()
            engine.step()
        after = _loopback_at_rest()
    return Count(
        params=params,
        padding=engine.full_params.numel() - params,
        held=held,
        peak=meter.peak,
        sent=meter.sent_bytes(),
        wire=None if before is None or after is None else (after - before) / job.steps,
        losses=losses,
        digest=digest(engine.full_params[:params]),
        weights=engine.full_weights()[:params],
    )


def train_in_one_process(
    job: Job,
    world_size: int,
    combine: Callable[[list[Tensor]], Tensor] = sum_in_rank_order,
    scale: float | None = None,
) -> tuple[Tensor, str]:
    """What the stages must equal: the same training without ranks.

    For every step the micro-batches of all ranks are taken one after the other, each leaves its
    gradient in the working dtype; these are summed in rank order in fp32 and rounded once, and
    all weights are updated at once, with 1/world_size of the sum. Nothing is padded, sharded or
    sent. Returns the fp32 weights (Ψ,) and the digest of the working parameters.

    Another `combine` of the ranks' gradients, each (Ψ,), or another `scale` shows what a mistake
    there leads to.
    """
    precision = precision_of(job.recipe)
    model = GPT(job.model)
    params = list(model.parameters())
    shapes, numel = [p.shape for p in params], num_parameters(model)
    adamw = AdamW(flatten([p.data for p in params], numel, torch.float32), job.options)
    for step in range(job.steps):
        working = adamw.master.to(precision.working)
        for param, data_view in zip(params, views(working, shapes), strict=True):
            param.grad, param.data = None, data_view
        grads = []
        for rank in range(world_size):
            model.loss(*data.batch(step, rank, world_size)).backward()
            whole = [p.grad for p in params if p.grad is not None]
            grads.append(flatten(whole, numel, precision.working))
            model.zero_grad(set_to_none=True)
        combined = combine(grads).to(precision.working)
        adamw.update(combined, scale=1 / world_size if scale is None else scale)
    return adamw.master, digest(adamw.master.to(precision.working))


def digest(tensor: Tensor) -> str:
    """A fingerprint of a tensor's bits: equal tensors of one dtype have equal ones."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _loopback_at_rest() -> int | None:
    """The loopback counter at a moment when no rank is sending."""
    dist.barrier()
    time.sleep(0.02)
    counter = loopback_bytes()
    dist.barrier()
    return counter
