"""What a layout keeps, and when: the stages here, both FSDPs and DDP at four instants of a step.

FSDP1 is FullyShardedDataParallel with a ShardingStrategy; FSDP2 is fully_shard. Both run on gloo
and the CPU; FSDP1 has to be told so.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zerolab.practice import data
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.measure import STAGES
from zerolab.practice.meter import KINDS, Meter, hear_resizes, steady, young_garbage
from zerolab.practice.peers import Peer, _adamw, ddp, fsdp2

FSDP1 = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
FSDP2 = {"reshard_after_forward=True": True, "reshard_after_forward=False": False}
LAYOUTS = ("DDP", *(f"our stage {stage}" for stage in STAGES), *FSDP1, *FSDP2)
SMALL = GPTConfig(width=32)
GATHERS = ("_allgather_base_", "allgather_")
REDUCTIONS = ("_reduce_scatter_base_", "reduce_scatter_", "allreduce_")


@dataclass(frozen=True)
class Instants:
    """What one rank held and sent; bytes, sent ones in a step of one micro-batch.

    between      model states between two steps, when gradients are gone
    forward      what a second micro-batch's forward ends with, less activations: with gradients of
                 the first, and parameters that are whole
    backward     all model states when the second backward is done, by kind and in "total"
    peak         the most that lived in a step of one micro-batch, activations included
    sent         by collective
    gathers      bytes of the buffer that each all-gather fills, in order
    reductions   calls that sum gradients, by their names in torch
    said         what torch warned of
    """

    between: int
    forward: int
    backward: dict[str, int]
    peak: int
    sent: dict[str, int]
    gathers: list[int]
    reductions: dict[str, int]
    said: list[str]


class Calls(Meter):
    """A meter that notes each collective of torch.distributed with the bytes it works on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def _book(self, op: str, args: Any) -> None:
        super()._book(op, args)
        sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        whole = sum(sizes) - min(sizes) if op == "allgather_" else max(sizes, default=0)
        self.calls.append((op, whole))  # allgather_ has N parts beside the rank's own

    def settled(self) -> dict[str, int]:
        """What is held once the process group's threads have let go of their buffers."""
        gc.collect()
        return steady(self.held)


def fsdp1(model: nn.Module, strategy: str, dtype: torch.dtype, mesh: Any = None) -> Peer:
    """FSDP1 around every unit and the root, as `zerolab.practice.peers.fsdp2` has it."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    low = None if dtype == torch.float32 else MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    units = {id(unit) for unit in model.units()}  # type: ignore[operator]

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or id(module) in units

    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
        mixed_precision=low,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),  # else: "FSDP needs a non-CPU accelerator device"
    )
    return Peer(wrapped, _adamw(wrapped.parameters()))


def _made(name: str, model: Any, dtype: torch.dtype) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if name == "DDP":
        return ddp(model)  # in fp32 alone: it has no policy of its own
    if name in FSDP2:
        return fsdp2(model, FSDP2[name], dtype)
    if name in FSDP1:
        ranks = Comm().world_size
        shape = (ranks // 2, 2) if name == "HYBRID_SHARD" else (ranks,)
        return fsdp1(model, name, dtype, init_device_mesh("cpu", shape))
    recipe = "adamw-fp32" if dtype == torch.float32 else "adamw-mixed"
    return STAGES[int(name[-1])](model, Comm(), recipe=recipe)


def watch_layout(
    name: str, dtype: torch.dtype = torch.bfloat16, config: GPTConfig = SMALL
) -> Instants:
    """Trains a few steps in a layout and looks (call it on all ranks); ValueError for no layout.

    HYBRID_SHARD shards over pairs of ranks. DDP stays in fp32.
    """
    if name not in LAYOUTS:
        raise ValueError(f"The layout {name!r} is not known: choose one of {', '.join(LAYOUTS)}.")
    return watch(lambda model: _made(name, model, dtype), dtype if name != "DDP" else torch.float32,
                 config)  # fmt: skip


def watch(
    make: Callable[[GPT], Any], dtype: torch.dtype = torch.bfloat16, config: GPTConfig = SMALL
) -> Instants:
    """The same for any engine with `backward` and `step`, as `make(model)` returns one."""
    comm = Comm()
    with warnings.catch_warnings(record=True) as caught, young_garbage():
        warnings.simplefilter("always")
        activations = _activations(config, dtype)
        with Calls() as meter, hear_resizes(meter):
            engine = make(GPT(config))
            loss_of = getattr(engine, "loss", None) or engine.model.loss
            batches = [data.batch(at, comm.rank, comm.world_size) for at in range(2)]

            def passes(batch: Any) -> int:
                loss = loss_of(*batch)
                held = meter.settled()["total"]
                engine.backward(loss)
                return held

            for _ in range(2):  # the first makes the optimizer's states, DDP regroups in the second
                passes(batches[0])
                engine.step()
            between = meter.settled()["total"]
            meter.calls.clear()
            meter.sent.clear()
            meter.reset_peak()
            passes(batches[0])
            engine.step()
            peak, sent, calls = meter.peak, meter.sent_bytes(), list(meter.calls)
            passes(batches[0])
            forward = passes(batches[1])
            if hasattr(engine, "label_states"):
                engine.label_states()
            held = meter.settled()
            engine.step()
    counters = held["total"] - sum(held[kind] for kind in KINDS)  # batches, counters of steps
    states = {kind: held[kind] for kind in KINDS}
    return Instants(
        between=between - counters,
        forward=forward - counters - activations,
        backward=states | {"total": sum(states.values())},
        peak=peak,
        sent=sent,
        gathers=[size for op, size in calls if op in GATHERS],
        reductions=dict(Counter(op for op, _ in calls if op in REDUCTIONS)),
        said=sorted({f"{w.category.__name__}: {w.message}" for w in caught}),
    )


def _activations(config: GPTConfig, dtype: torch.dtype) -> int:
    """Bytes that a forward of the model alone leaves for backward, in that precision."""
    model = GPT(config).to(dtype)
    batch = data.batch(0, 0, 1)
    with Calls() as meter:
        for tensor in (*model.parameters(), *batch):
            meter.see(tensor)
        start = meter.settled()["total"]
        logits = model(batch[0])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())
        del logits
        held = meter.settled()["total"] - start
    del loss
    return held


def import_fsdp() -> None:
    """Loads both FSDPs on a rank, which takes a second or two: before anything with a time limit.

    The first `fully_shard` would load torch's compiler, too, which takes longer than the rest.
    """
    import torch.distributed.fsdp

    with contextlib.suppress(ImportError):  # a module of torch's own, which may change its name
        import torch._dynamo  # noqa: F401
