"""The same model under what PyTorch and DeepSpeed offer, each as a function that makes one step.

Every peer gets the AdamW options, the fused kernel and the precision of the stage that it is held
against. A maker takes a model with fp32 weights and returns `step(tokens, targets) -> loss`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.gpt import GPT

Step = Callable[[Tensor, Tensor], Tensor]
OPTIONS = AdamWOptions()


def _adamw_arguments() -> dict[str, Any]:
    o = OPTIONS
    betas = (o.beta1, o.beta2)
    return {"lr": o.lr, "betas": betas, "eps": o.eps, "weight_decay": o.weight_decay}


def _torch_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(model: GPT) -> Step:
    """DistributedDataParallel in fp32: everything replicated, gradients all-reduced."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _torch_step(
        wrapped, torch.optim.AdamW(wrapped.parameters(), fused=True, **_adamw_arguments())
    )


def zero_redundancy(model: GPT) -> Step:
    """DDP with ZeroRedundancyOptimizer in fp32: whole parameters, handed out greedily."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, fused=True, **_adamw_arguments()
    )
    return _torch_step(wrapped, optimizer)


def fsdp2(model: GPT, reshard: bool = True, dtype: torch.dtype = torch.bfloat16) -> Step:
    """fully_shard of every unit and of the root: fp32 shards, computing and reducing in `dtype`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # returns a view: we do not write it
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": reshard,
    }
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for unit in model.units():
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return _torch_step(
        model, torch.optim.AdamW(model.parameters(), fused=True, **_adamw_arguments())
    )


def deepspeed(model: GPT, stage: int) -> Step:
    """DeepSpeed's engine at a stage, in bf16 on the CPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds  # type: ignore[import-not-found]

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,  # its default is 1.0, and the stages here do not clip
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_adamw_arguments())
    engine, *_ = ds.initialize(
        model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = engine(tokens)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


PEERS: dict[str, Callable[[GPT], Step]] = {
    "ddp": ddp,
    "zero-redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "fsdp2-fp32": lambda model: fsdp2(model, dtype=torch.float32),
    "fsdp2-no-reshard": lambda model: fsdp2(model, reshard=False),
}
if importlib.util.find_spec("deepspeed"):
    PEERS |= {f"deepspeed-{stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)}


def versions() -> dict[str, str]:
    """Name and version of the packages that the peers come from."""
    names = ["torch", "deepspeed"] if "deepspeed-3" in PEERS else ["torch"]
    return {name: importlib.metadata.version(name) for name in names}
