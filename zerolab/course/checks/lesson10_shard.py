"""Lesson 10: a learner's use of fully_shard, on real ranks, judged by the bytes of each gather."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerolab.course.checks.core import Wrong
from zerolab.course.checks.on_ranks import on_ranks
from zerolab.course.withheld import withheld
from zerolab.practice.gpt import GPT
from zerolab.practice.layouts import SMALL, import_fsdp, watch
from zerolab.practice.peers import Peer, _adamw

RANKS = 4


@dataclass(frozen=True)
class Sharded:
    """What one rank showed of the learner's model in fp32; bytes.

    gathers in order of one step, `root` whether the model itself was passed to fully_shard,
    `fsdp1` whether it is wrapped in FSDP1.
    """

    gathers: list[int]
    reductions: dict[str, int]
    sent: int
    reduced: int
    states: int
    root: bool
    fsdp1: bool


def judge(answer: Callable[..., Any]) -> None:
    """Raises Wrong unless every unit is gathered on its own, once for each pass, and freed."""
    try:
        seen = on_ranks(_trial, answer, size=RANKS, ready=import_fsdp)[0]
    except Wrong as wrong:
        if "Invariant encountered" not in wrong.difference:
            raise
        raise Wrong(
            f"torch refuses: {wrong.difference.partition(': ')[2]}",
            "A module's parameters belong to the first that takes them. From the inside out: the "
            "units first, the model last.",
        ) from None
    _judge(seen, [_padded(unit) for unit in GPT(SMALL).units()])


def _padded(unit: nn.Module) -> int:
    """Bytes of a unit when gathered: rows of each parameter, a multiple of the ranks."""
    rows = (4 * (-(-p.shape[0] // RANKS) * RANKS) * (p.numel() // p.shape[0])
            for p in unit.parameters())  # fmt: skip
    return sum(rows)


def _judge(seen: Sharded, units: list[int]) -> None:
    whole = sum(units)
    if not seen.sent:
        raise Wrong(
            "In a step nothing is sent: every rank trains a model of its own.",
            "Nothing was passed to fully_shard. It changes a module in place.",
        )
    if not seen.gathers:
        raise Wrong(
            f"No parameter is gathered, and each rank holds {seen.states:,} bytes of states.",
            "Gradients are all-reduced and every state is whole: this is DDP, stage 0.",
        )
    if "allreduce_" in seen.reductions:
        raise Wrong(
            f"Gradients are reduce-scattered and then all-reduced; a rank holds {seen.states:,} "
            "bytes of states.",
            "That is hybrid sharding: the mesh has two dimensions. Use the one that you are given.",
            points=2,
        )
    if Counter(seen.gathers) == Counter(2 * [size // 2 for size in units]):
        raise Wrong(
            f"The gathers of a step fill {sum(seen.gathers):,} bytes, where twice {whole:,} are "
            "due in fp32.",
            "Parameters travel in 16 bits: leave mp_policy out, and the model as it is.",
            points=2,
        )
    if seen.fsdp1:
        raise Wrong(
            f"The all-gathers of a step fill {_list(seen.gathers)} bytes.",
            "These are flat buffers of FullyShardedDataParallel, which is FSDP1: use fully_shard.",
        )
    if set(seen.gathers) == {whole}:
        raise Wrong(
            f"Each all-gather fills {whole:,} bytes: the whole model at once.",
            "All parameters are one group: only the root was passed to fully_shard, or all units "
            "in one call. At rest a rank holds a fourth, at work everything.",
            points=1,
        )
    if len(seen.gathers) > 2 * len(units):
        raise Wrong(
            f"There are {len(seen.gathers)} all-gathers in a step, where {2 * len(units)} do.",
            "Each call of fully_shard makes a group with gathers of its own: pass whole units, "
            "not the layers inside them.",
            points=1,
        )
    merged = units[0] + units[-1]
    if merged in seen.gathers:
        raise Wrong(
            f"One all-gather fills {merged:,} bytes: the embedding and the head together, which "
            "then stay until backward is done.",
            "What no unit has taken falls to the root's group. That is how the usual loop over "
            "blocks works; here all of model.units() shall be freed after use.",
            points=3,
        )
    if seen.gathers == units:
        if seen.root:
            raise Wrong(
                "Each unit is gathered once in a step, in forward, and stays whole until backward.",
                "reshard_after_forward=False is SHARD_GRAD_OP's layout. The default frees a unit.",
                points=2,
            )
        raise Wrong(
            "Each unit is gathered once in a step, in forward, and stays whole until backward.",
            "The model itself was not passed to fully_shard, last of all. So each unit takes "
            "itself for a root, and a root is not freed after forward.",
            points=2,
        )
    if Counter(seen.gathers) != Counter(2 * units):
        why = "Pass each of model.units() to fully_shard, then the model."
        if len(seen.gathers) == 2 * len(units):
            why = "As many as there should be, of another size: is there an option besides mesh?"
        raise Wrong(
            f"The all-gathers of a step fill {_list(seen.gathers)} bytes; one for each unit and "
            f"pass would be {_list(units)} and the same backwards.",
            why,
        )
    each = whole * (RANKS - 1) // RANKS
    if seen.reduced != each:
        raise Wrong(
            f"The gathers are right, and {seen.reduced:,} bytes are sent to sum the gradients, "
            f"where {each:,} are due in fp32.",
            "Gradients travel in another precision than fp32: leave mp_policy out here.",
            points=2,
        )
    if seen.sent != 3 * each:
        raise Wrong(
            f"The gathers have the right sizes, and a rank sends {seen.sent:,} bytes in a step, "
            f"where {3 * each:,} are due.",
            "Something is cut over fewer ranks after forward: leave reshard_after_forward out.",
            points=2,
        )


def _list(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _trial(shard_model: Callable[..., Any]) -> Sharded:
    """Runs on a rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kept: list[nn.Module] = []

    def make(model: GPT) -> Peer:
        with withheld(["zerolab.practice.peers:fsdp2"]):
            made = shard_model(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        if made is not None and not isinstance(made, nn.Module):
            raise TypeError(f"shard_model returned a {type(made).__name__}: return the model")
        kept.append(model if made is None else made)
        return Peer(kept[0], _adamw(kept[0].parameters()))

    seen = watch(make, torch.float32)
    return Sharded(
        gathers=seen.gathers,
        reductions=seen.reductions,
        sent=seen.sent["total"],
        reduced=seen.sent["reduce_scatter"],
        states=seen.backward["total"],
        root=isinstance(kept[0], FSDPModule),
        fsdp1=isinstance(kept[0], FullyShardedDataParallel),
    )
