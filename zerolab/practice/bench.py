"""How fast the stages are beside their peers: ratios from interleaved rounds of one run.

Absolute times say little on a shared machine. In every round each engine makes one step, one
after the other, and a pair's ratio is the median over rounds of ours divided by theirs. CPU
seconds, summed over ranks, are less disturbed by other programs than wall time; both are given.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zerolab.practice import data
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.measure import STAGES, loopback_at_rest
from zerolab.practice.meter import Meter
from zerolab.practice.peers import PEERS, Step, versions

MODEL = GPTConfig(context=128, width=384, layers=6, heads=6)  # 10.7 million parameters
LINES, SEQUENCES = 12, 4  # 119 tokens a sequence; the sequences are divided over the ranks
PAIRS: list[tuple[str, int, str, dict[str, Any], str, str]] = [
    # ours, stage, recipe, options; peer; precision
    ("stage 0", 0, "adamw-fp32", {}, "ddp", "fp32"),
    ("stage 1", 1, "adamw-fp32", {}, "zero-redundancy", "fp32"),
    ("stage 2", 2, "adamw-mixed", {}, "fsdp2-no-reshard", "bf16"),
    ("stage 3", 3, "adamw-mixed", {}, "fsdp2", "bf16"),
    ("stage 3", 3, "adamw-fp32", {}, "fsdp2-fp32", "fp32"),
    ("stage 3", 3, "adamw-mixed", {}, "deepspeed-3", "bf16"),
]


@dataclass(frozen=True)
class Timing:
    """One engine on one rank: seconds of each round, and bytes of a step."""

    wall_s: list[float]
    cpu_s: list[float]
    loss: float
    sent_bytes: int  # what this rank handed to others, as its ring algorithms would send it
    wire_bytes: int | None  # what the loopback carried, all ranks together


def _ours(config: GPTConfig, stage: int, recipe: str, options: dict[str, Any]) -> Step:
    model = GPT(config)
    engine = STAGES[stage](model, Comm(), recipe=recipe, **options)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model.loss(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _theirs(peer: str, config: GPTConfig) -> Step:
    return PEERS[peer](GPT(config))


def race(rounds: int, config: GPTConfig = MODEL) -> dict[str, Timing]:
    """Runs every engine on this rank, in turn; call it on all ranks."""
    makers: dict[str, Any] = {}
    for ours, stage, recipe, options, peer, precision in PAIRS:
        if peer in PEERS:
            makers[f"{ours} {precision}"] = partial(_ours, config, stage, recipe, options)
            makers[peer] = partial(_theirs, peer, config)
    rank, size = dist.get_rank(), dist.get_world_size()
    sequences = max(1, SEQUENCES // size)
    steps: dict[str, Step] = {}
    counted: dict[str, tuple[int, int | None]] = {}
    for name, make in makers.items():
        steps[name] = make()
        for at in range(2):
            steps[name](*data.batch(at, rank, size, sequences, LINES))
        counted[name] = _count(steps[name], data.batch(2, rank, size, sequences, LINES))
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for at in range(3, 3 + rounds):
        batch = data.batch(at, rank, size, sequences, LINES)
        for name, step in steps.items():
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            losses[name] = step(*batch)
            cpu[name].append(time.process_time() - began_cpu)
            dist.barrier()
            wall[name].append(time.perf_counter() - began)
    return {
        name: Timing(wall[name], cpu[name], losses[name].item(), *counted[name]) for name in steps
    }


def _count(step: Step, batch: Any) -> tuple[int, int | None]:
    before = loopback_at_rest()
    with Meter() as meter:
        step(*batch)
    after = loopback_at_rest()
    wire = None if before is None or after is None else after - before
    return meter.sent_bytes()["total"], wire


def summary(
    ranks: int, results: list[dict[str, Timing]], config: GPTConfig = MODEL
) -> dict[str, Any]:
    """Ratios and bytes from every rank's timings; ratios below 1 mean that ours is faster."""
    params = num_parameters(GPT(config))
    pairs = []
    for ours, _, _, _, peer, precision in PAIRS:
        if peer not in results[0]:
            continue
        own, their = f"{ours} {precision}", peer
        wall = [
            a / b for a, b in zip(results[0][own].wall_s, results[0][their].wall_s, strict=True)
        ]
        cpu_own, cpu_their = _cpu(results, own), _cpu(results, their)
        cpu = [a / b for a, b in zip(cpu_own, cpu_their, strict=True)]
        pairs.append({
            "ours": ours, "peer": peer, "precision": precision, "rounds": len(wall),
            "ratio": round(statistics.median(wall), 3),
            "cpu_ratio": round(statistics.median(cpu), 3),
        })  # fmt: skip
    engines = {
        name: {
            "median_s": round(statistics.median(first.wall_s), 4),
            "cpu_s": round(statistics.median(_cpu(results, name)), 4),
            "loss": round(first.loss, 4),
            "sent_bytes_per_parameter": round(first.sent_bytes / params, 3),
            "wire_bytes_per_parameter": first.wire_bytes
            and round(first.wire_bytes / ranks / params, 3),
        }
        for name, first in results[0].items()
    }
    return {
        "ranks": ranks, "params": params, "pairs": pairs, "engines": engines, "peers": versions(),
        "note": "a step of stage n / a step of the peer, median of interleaved rounds",
    }  # fmt: skip


def _cpu(results: list[dict[str, Timing]], name: str) -> list[float]:
    return [sum(each) for each in zip(*(r[name].cpu_s for r in results), strict=True)]
