"""The same model under what PyTorch and DeepSpeed offer, each as an engine like a stage's.

Every peer gets the AdamW options, the fused kernel and the precision of the stage that it is held
against. A maker takes a model with fp32 weights and returns a `Peer`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.meter import label, tensors_in, watching

Step = Callable[[Tensor, Tensor], Tensor]
OPTIONS = AdamWOptions()


class Peer:
    """An engine with the methods of a stage; called with tokens and targets, it makes a step.

    `model` is the wrapped model that computes, `optimizer` what updates this rank's part of it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in fp32, computed by the wrapped model."""
        logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def backward(self, loss: Tensor) -> None:
        """Adds this micro-batch's gradients; the wrapper sends what it sends."""
        loss.backward()

    def step(self, max_norm: float | None = None) -> None:
        """Updates the weights; ValueError for clipping, which peers do each in a way of their own.

        What is held is labelled first, while the gradients are there.
        """
        if max_norm is not None:
            raise ValueError("A peer clips in a way of its own: measure it without.")
        if watching():
            self.label_states()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One whole step; returns the loss."""
        loss = self.loss(tokens, targets)
        self.backward(loss)
        self.step()
        return loss.detach()

    def label_states(self) -> None:
        """Tells the meter what this rank's storages are for: after backward, before the step."""
        working = {id(p) for p in self.model.parameters()}
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # ZeroRedundancyOptimizer's
        for group in optimizer.param_groups:
            masters = [p for p in group["params"] if id(p) not in working]
            _label(masters, "optimizer_states")
        for state in optimizer.state.values():
            _label(state.values(), "optimizer_states")
        _label(self.model.parameters(), "parameters")
        _label((p.grad for p in self.model.parameters()), "gradients")


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor: the local part of a DTensor, else the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _label(tensors: Iterable[Any], kind: str) -> None:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and local(tensor).dim() > 0:  # a step counter is no state
            label(local(tensor), kind)


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **_options())


def _options() -> dict[str, Any]:
    o = OPTIONS
    betas = (o.beta1, o.beta2)
    return {"lr": o.lr, "betas": betas, "eps": o.eps, "weight_decay": o.weight_decay}


def ddp(model: nn.Module) -> Peer:
    """DistributedDataParallel in fp32: everything replicated, gradients all-reduced."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Peer(wrapped, _adamw(wrapped.parameters()))


def zero_redundancy(model: nn.Module) -> Peer:
    """DDP with ZeroRedundancyOptimizer in fp32: whole parameters, handed out greedily."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, fused=True, **_options()
    )
    return Peer(wrapped, optimizer)


def fsdp2(
    model: nn.Module,
    reshard: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    mesh: Any = None,
) -> Peer:
    """fully_shard of every unit and of the root: fp32 shards, computing and reducing in `dtype`.

    Units that share a parameter (tied weights) are left to the root, as fully_shard would untie
    them. A `mesh` of two dimensions is hybrid sharding: replicated over the first, sharded over the
    second.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # returns a view: we do not write it
    options: dict[str, Any] = {
        "mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": reshard,
    }
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    units = list(model.units())  # type: ignore[operator]
    for unit in units:
        if not any(_parameters(unit) & _parameters(other) for other in units if other is not unit):
            fully_shard(unit, **options)
    fully_shard(model, **options)
    return Peer(model, _adamw(model.parameters()))


def _parameters(module: nn.Module) -> set[int]:
    return {id(p) for p in module.parameters()}


# DeepSpeed's default bucket, 5e8 elements, would be a gigabyte for the smallest model.
ZERO = {"overlap_comm": False, "reduce_bucket_size": 10**7, "allgather_bucket_size": 10**7}
# By default parameters under 10^5 elements stay whole on every rank, are gathered once a step
# behind the update, and up to 10^9 others are kept from forward to backward: of a model as small
# as ours that is all, so what is called stage 3 would send 2 units a step where the papers say 3.
FREE_AFTER_USE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


# Where DeepSpeed keeps what, by the attributes of its ZeRO optimizers. Moments are where torch's
# AdamW keeps them; a version without one of these names leaves what it holds there without a kind.
DEEPSPEED_STATES = {
    "parameters": ("fp16_partitioned_groups_flat",),
    "gradients": ("all_grad_tensors", "averaged_gradients", "grad_partitions_flat_buffer"),
    "optimizer_states": ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"),
}


class DeepSpeed(Peer):
    """DeepSpeed's engine at a stage, in bf16 on the CPU.

    It is told that `step` ends a step, where by default a number of backwards does: so gradients of
    any number are added up, and stage 1 keeps them whole until `step` and reduces them there.
    """

    def __init__(self, model: nn.Module, stage: int) -> None:
        if not HAS_DEEPSPEED:
            raise ValueError("DeepSpeed is not installed here: measure another peer.")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed as ds  # type: ignore[import-not-found]

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "managed_gradient_accumulation": False,
            "zero_optimization": ZERO | (FREE_AFTER_USE if stage == 3 else {}) | {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "gradient_clipping": 0.0,  # its default is 1.0, and the stages here do not clip
        }
        parameters = list(model.parameters())
        optimizer = _adamw(parameters)
        self.engine, *_ = ds.initialize(
            model=model, optimizer=optimizer, model_parameters=parameters, config=config
        )
        super().__init__(self.engine, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self, max_norm: float | None = None) -> None:
        if watching():
            self.label_states()
        self.engine.step()

    def label_states(self) -> None:
        """Adds DeepSpeed's own flat tensors; its reduce buckets are temporary."""
        super().label_states()
        zero = getattr(self.engine, "optimizer", None)
        for kind, names in DEEPSPEED_STATES.items():
            for name in names:
                _label(tensors_in(getattr(zero, name, None)), kind)
        for bucket in getattr(zero, "ipg_buckets", {}).values():
            _label(tensors_in(getattr(bucket, "buffer", None)), "temporary")


HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
PEERS: dict[str, Callable[[Any], Peer]] = {
    "ddp": ddp,
    "zero-redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "fsdp2-fp32": lambda model: fsdp2(model, dtype=torch.float32),
    "fsdp2-no-reshard": lambda model: fsdp2(model, reshard=False),
}
if HAS_DEEPSPEED:
    PEERS |= {
        "deepspeed-1": lambda model: DeepSpeed(model, 1),
        "deepspeed-2": lambda model: DeepSpeed(model, 2),
        "deepspeed-3": lambda model: DeepSpeed(model, 3),
    }


def peer_named(name: str) -> Callable[[Any], Peer]:
    """The maker of that name; ValueError, in one sentence, for one that is not here."""
    if name in PEERS:
        return PEERS[name]
    if name in ("deepspeed-1", "deepspeed-2", "deepspeed-3"):
        raise ValueError(f"The peer {name} needs DeepSpeed, which is not installed here.")
    raise ValueError(f"The peer {name!r} is not known: choose one of {', '.join(PEERS)}.")


def versions() -> dict[str, str]:
    """Name and version of the packages that the peers come from."""
    names = ["torch", "deepspeed"] if HAS_DEEPSPEED else ["torch"]
    return {name: importlib.metadata.version(name) for name in names}
