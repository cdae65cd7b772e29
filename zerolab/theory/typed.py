"""A strategy as what a person would type: PyTorch lines and a DeepSpeed configuration."""

import json

from zerolab.theory.memory import recipe_named
from zerolab.theory.plan import Plan


def pytorch_lines(p: Plan) -> str:
    """DDP, ZeroRedundancyOptimizer or fully_shard; a comment where FSDP2 has no equivalent."""
    s = p.strategy
    if s.stage == 0:
        return "model = DistributedDataParallel(model)"
    if s.stage == 1:
        return ("model = DistributedDataParallel(model)\noptimizer = ZeroRedundancyOptimizer("
                "model.parameters(), optimizer_class=torch.optim.AdamW)")  # fmt: skip
    mesh = f"({p.ranks // s.group}, {s.group})" if s.group else f"({p.ranks},)"
    reduce = (s.reduce_bytes or recipe_named(s.recipe).reduce_bytes) > 2
    dtype = "torch.float32" if reduce else "torch.bfloat16"
    kept = "" if s.stage == 3 else ", reshard_after_forward=False"
    off = ", offload_policy=CPUOffloadPolicy()" if s.optimizer_on == "cpu" else ""
    nvme = ["# FSDP2 has no NVMe offload"] if "nvme" in (s.optimizer_on, s.parameters_on) else []
    return "\n".join([
        f'mesh = init_device_mesh("cuda", {mesh})',
        f"policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype={dtype})",
        "for block in model.blocks:",
        f"    fully_shard(block, mesh=mesh, mp_policy=policy{kept}{off})",
        f"fully_shard(model, mesh=mesh, mp_policy=policy{kept}{off})",
        *nvme,
    ])  # fmt: skip


def deepspeed_json(p: Plan) -> str:
    """The configuration's text; NVME_FOLDER stands for a folder on a local disk."""
    s = p.strategy
    zero: dict = {"stage": s.stage}
    for key, tier in (("offload_optimizer", s.optimizer_on), ("offload_param", s.parameters_on)):
        if tier != "gpu":
            path = {"nvme_path": "NVME_FOLDER"} if tier == "nvme" else {}
            zero[key] = {"device": tier, "pin_memory": True, **path}
    if s.group:
        zero["mics_shard_size"] = s.group
    config = {
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.accumulation,
        "bf16": {"enabled": recipe_named(s.recipe).gather_bytes == 2},
        "zero_optimization": zero,
    }
    if s.recompute == "full":
        config["activation_checkpointing"] = {"cpu_checkpointing": s.checkpoints_on == "cpu"}
    return json.dumps(config, indent=2)
