"""Counts a stage while it trains: what each rank held and sent, and what became of the weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.practice import data
from zerolab.practice.adamw import AdamW, AdamWOptions
from zerolab.practice.comm import Comm, sum_in_rank_order
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.meter import Meter, loopback_bytes
from zerolab.practice.precision import LossScale, precision_of
from zerolab.practice.sharding import flatten, views
from zerolab.practice.stage0 import Stage0
from zerolab.practice.stage1 import Stage1
from zerolab.practice.stage2 import Stage2
from zerolab.practice.stage3 import Stage3

STAGES: dict[int, Any] = {0: Stage0, 1: Stage1, 2: Stage2, 3: Stage3}


@dataclass(frozen=True)
class Job:
    """What to train and how: `micro_batches` a step on each rank, gradients clipped to `max_norm`.

    `options` are the optimizer's; `engine` are keyword arguments of the stage, such as overlap.
    `build` makes the model from its sizes. With a `loss_scale`, where it begins, the steps in one
    process are those of `train_step`; `count` scales no loss, so that all its steps are alike.
    """

    stage: int
    recipe: str = "adamw-mixed"
    model: GPTConfig = field(default_factory=GPTConfig)
    steps: int = 10
    micro_batches: int = 1
    max_norm: float | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    options: AdamWOptions = field(default_factory=AdamWOptions)
    build: Callable[[GPTConfig], GPT] = GPT
    loss_scale: LossScale | None = None


@dataclass(frozen=True)
class Count:
    """What one rank counted; bytes, and per step where it says so.

    units       trained parameters of each unit that is padded on its own
    frozen      the same of units that are not trained, and that backward passes through
    ahead       the same of those that forward is through with before it meets a trained one
    held        persistent bytes by kind after the last backward and before its step
    peak        the largest sum of live tensor bytes inside the last step
    peak_kinds  what it was made of, by kind
    timeline    the parts of the last step and the bytes by kind at each one's peak: forward and
                backward of the units by their place, reductions, updates
    sent        bytes handed to other ranks by collective, in the last step
    wire        bytes that the loopback carried in an average step, for all ranks together;
                None where the system has no such counter
    losses      this rank's loss at each step
    digest      of this rank's working parameters after the last step, padding left out
    weights     (Ψ,) fp32: the master weights after the last step
    """

    params: int
    units: list[int]
    frozen: list[int]
    ahead: list[int]
    padding: int
    held: dict[str, int]
    peak: int
    peak_kinds: dict[str, int]
    timeline: list[tuple[str, dict[str, int]]]
    sent: dict[str, int]
    wire: float | None
    losses: list[float]
    digest: str
    weights: Tensor


def count(job: Job) -> Count:
    """Trains on this rank as the job says and returns what the meter saw (call it on all ranks)."""
    comm = Comm()
    torch.manual_seed(comm.rank)  # dropout differs from rank to rank
    model = job.build(job.model)
    named = list(model.named_parameters())
    params = num_parameters(model)
    with Meter() as meter:
        _mark_uses(model, meter)  # first, so that a stage gathers in the part that it does it for
        engine = STAGES[job.stage](model, comm, job.options, job.recipe, **job.engine)
        losses = []
        before = loopback_at_rest()
        for step in range(job.steps):
            if step == job.steps - 1:
                meter.reset_peak()
                meter.sent.clear()
            for micro_batch in range(job.micro_batches):
                at = step * job.micro_batches + micro_batch
                loss = model.loss(*data.batch(at, comm.rank, comm.world_size))
                engine.backward(loss / job.micro_batches)
                losses.append(loss.item())
                del loss
            held = meter.held()
            engine.step(job.max_norm)
        after = loopback_at_rest()
    weights, working = _whole(engine, comm)
    needs = list(engine.needs.values())
    ahead = list(takewhile(lambda units: not any(unit.trainable for unit in units), needs))
    later = {unit for units in needs[len(ahead) :] for unit in units}
    return Count(
        params=params,
        units=[unit.numel for unit in engine.units if unit.trainable],
        frozen=[unit.numel for unit in engine.units if unit in later and not unit.trainable],
        ahead=[unit.numel for unit in engine.units if unit not in later],
        padding=sum(unit.padded for unit in engine.units) - params,
        held=held,
        peak=meter.peak,
        peak_kinds=meter.peak_by_kind,
        timeline=meter.timeline,
        sent=meter.sent_bytes(),
        wire=None if before is None or after is None else (after - before) / job.steps,
        losses=losses,
        digest=digest(torch.cat([working[name].flatten() for name, _ in named])),
        weights=torch.cat([weights[name].flatten() for name, _ in named]),
    )


def _mark_uses(model: GPT, meter: Meter) -> None:
    """Has the meter's timeline tell where each unit's forward and backward begin."""
    for place, module in enumerate(model.units()):

        def before(*_: Any, place: int = place) -> None:
            meter.mark(f"forward {place}")

        def after(*given: Any, place: int = place) -> None:
            if given[-1].requires_grad:
                given[-1].register_hook(lambda _: meter.mark(f"backward {place}"))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def _whole(engine: Any, comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every parameter by name: the optimizer's own weights in fp32, and the working ones.

    The working ones are read from this rank's copy where it has one, not from their owners.
    """
    weights: dict[str, Tensor] = {}
    working: dict[str, Tensor] = {}
    for unit in engine.units:
        weights |= unit.whole(unit.adamw.master if unit.trainable else unit.param_shard, comm)
        there = unit.full_params.untyped_storage().nbytes() > 0
        working |= unit.whole(unit.full_params if there else unit.param_shard, comm)
    return {name: tensor.float() for name, tensor in weights.items()}, working


def train_in_one_process(
    job: Job,
    world_size: int,
    combine: Callable[[list[Tensor]], Tensor] = sum_in_rank_order,
    scale: float | None = None,
    delay: int = 0,
) -> tuple[Tensor, str]:
    """What the stages must equal: the same training without ranks.

    The micro-batches of all ranks are taken one after the other. Gradients are summed over ranks
    in rank order in fp32 and rounded once to the gradient dtype; micro-batches are added up in
    that dtype, at stages 0 and 1 on each rank before the sum over ranks, at stages 2 and 3 after
    it. Then all weights are updated at once, with 1/world_size of the sum. Nothing is padded,
    sharded or sent. Frozen parameters keep their values, in the working dtype. With a loss scale,
    a step whose gradients overflow is skipped. Returns the fp32 weights (Ψ,) and the digest of the
    working parameters.

    With `delay` 1 each update waits until the next step's gradients were computed without it, and
    the last one comes at the end. Another `combine` of the ranks' gradients, each (Ψ,), or another
    `scale` shows what a mistake there leads to.
    """
    precision = precision_of(job.recipe)
    model = job.build(job.model)
    params = list(model.parameters())
    shapes, numel = [p.shape for p in params], num_parameters(model)
    adamw = AdamW(flatten([p.data for p in params], numel, torch.float32), job.options)
    trained = flatten([torch.full_like(p, p.requires_grad) for p in params], numel, torch.bool)
    at_first = adamw.master.to(precision.working).float()
    adamw.master.copy_(torch.where(trained, adamw.master, at_first))
    scaling = replace(job.loss_scale) if job.loss_scale else LossScale(1.0)
    random = [torch.Generator().manual_seed(rank).get_state() for rank in range(world_size)]

    def gradient(at: int, rank: int) -> Tensor:
        torch.set_rng_state(random[rank])
        loss = model.loss(*data.batch(at, rank, world_size))
        (loss / job.micro_batches * scaling.scale).backward()
        random[rank] = torch.get_rng_state()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        model.zero_grad(set_to_none=True)
        return flatten(grads, numel, precision.gradient)

    def update(total: Tensor, factor: float) -> None:
        adamw.update(total, factor)
        adamw.master.copy_(torch.where(trained, adamw.master, at_first))

    waiting: list[tuple[Tensor, float]] = []
    for step in range(job.steps):
        working = adamw.master.to(precision.working)
        for param, data_view in zip(params, views(working, shapes), strict=True):
            param.grad, param.data = None, data_view
        grads = [
            [gradient(step * job.micro_batches + micro, rank) for micro in range(job.micro_batches)]
            for rank in range(world_size)
        ]
        if job.stage < 2:
            total = combine([_added_up(own) for own in grads]).to(precision.gradient)
        else:
            sums = [combine(list(each)).to(precision.gradient) for each in zip(*grads, strict=True)]
            total = _added_up(sums)
        factor = (1 / world_size if scale is None else scale) / scaling.scale
        if job.loss_scale:
            overflowed = not bool(total.isfinite().all())
            scaling.update(overflowed)
            if overflowed:
                continue
        if job.max_norm is not None:
            norm = total.double().square().sum().sqrt().item() * factor
            factor *= min(1.0, job.max_norm / (norm + 1e-6))
        waiting.append((total, factor))
        if len(waiting) > delay:
            update(*waiting.pop(0))
    for late in waiting:
        update(*late)
    return adamw.master, digest(adamw.master.to(precision.working))


def _added_up(micro_batches: list[Tensor]) -> Tensor:
    """Gradients of one micro-batch after the other, added in their own dtype."""
    total = micro_batches[0].clone()
    for grad in micro_batches[1:]:
        total.add_(grad)
    return total


def digest(tensor: Tensor) -> str:
    """A fingerprint of a tensor's bits: equal tensors of one dtype have equal ones."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def loopback_at_rest() -> int | None:
    """The loopback counter at a moment when no rank is sending."""
    dist.barrier()
    time.sleep(0.02)
    counter = loopback_bytes()
    dist.barrier()
    return counter
