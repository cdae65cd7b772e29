"""A strategy as what a person would type: PyTorch lines and a DeepSpeed configuration.

Sources: the docstrings of torch.distributed.fsdp; DeepSpeed's configuration page, config-json.
"""

from zerolab.theory.memory import recipe_named
from zerolab.theory.plan import Plan


def pytorch_lines(p: Plan) -> str:
    """DDP, ZeroRedundancyOptimizer or fully_shard; a comment where PyTorch does something else."""
    s, recipe = p.strategy, recipe_named(p.strategy.recipe)
    off, notes = s.optimizer_on != "gpu" or s.parameters_on != "gpu", []
    if s.tensor_parallel > 1:
        notes.append(f"# model is parallelized over {s.tensor_parallel} ranks before this")
    if s.stage < 2:
        if off or s.group:
            notes.append("# PyTorch has no offload and no hybrid groups at this stage")
        lines = ["model = DistributedDataParallel(model)"]
        if s.stage == 1:
            who = "model.parameters(), optimizer_class=torch.optim.AdamW"
            lines.append(f"optimizer = ZeroRedundancyOptimizer({who})")
        return "\n".join([*notes, *lines])
    if recipe.optimizer[:1] == (("master weight", 4),):
        notes.append("# no separate master weights: shards stay fp32, see the recipe fsdp2-mixed")
    if s.stage == 2:
        notes.append("# FSDP2 shards parameters between steps, too")
    if off:
        notes.append("# CPUOffloadPolicy moves parameters, gradients and optimizer states together")
    if "nvme" in (s.optimizer_on, s.parameters_on):
        notes.append("# FSDP2 has no NVMe offload")
    mesh = f"({p.ranks},)"
    if s.group:  # fully_shard refuses a mesh of two dimensions without names
        mesh = f'({p.ranks // s.group}, {s.group}), mesh_dim_names=("replicate", "shard")'
    low = ["torch.bfloat16" if size == 2 else "torch.float32"
           for size in (recipe.gather_bytes, s.reduce_bytes or recipe.reduce_bytes)]  # fmt: skip
    how = "mesh=mesh, mp_policy=policy" + ("" if s.stage == 3 else ", reshard_after_forward=False")
    how += ", offload_policy=CPUOffloadPolicy()" if off else ""
    return "\n".join([
        *notes,
        f'mesh = init_device_mesh("cuda", {mesh})',
        f"policy = MixedPrecisionPolicy(param_dtype={low[0]}, reduce_dtype={low[1]})",
        "for block in model.blocks:",
        f"    fully_shard(block, {how})",
        f"fully_shard(model, {how})",
    ])  # fmt: skip


def deepspeed_config(p: Plan) -> dict:
    """The configuration; NVME_FOLDER stands for a folder on a local disk.

    ValueError where DeepSpeed has no way to say it.
    """
    s, recipe = p.strategy, recipe_named(p.strategy.recipe)
    off = {"offload_optimizer": s.optimizer_on, "offload_param": s.parameters_on}
    zero: dict = {"stage": s.stage}
    if s.stage in (1, 2):  # by default it all-reduces: three passes over the gradients' size, not 2
        zero["use_multi_rank_bucket_allreduce"] = False
    for key, tier in off.items():
        if tier != "gpu":
            path = {"nvme_path": "NVME_FOLDER"} if tier == "nvme" else {}
            zero[key] = {"device": tier, "pin_memory": True, **path}
    if s.group:  # MiCS, which did, is gone from its ZeRO page
        raise ValueError("DeepSpeed has no hybrid sharding of all states: its nearest key, "
                         "zero_hpz_partition_size, groups parameters only.")  # fmt: skip
    bf16: dict = {"enabled": recipe.gather_bytes == 2}
    if recipe.name.startswith("deepspeed-bf16"):
        bf16 |= {"bf16_master_weights_and_grads": True,
                 "bf16_optimizer_states": recipe.name.endswith("states")}  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.accumulation,
        "bf16": bf16,
        "zero_optimization": zero,
    }
    if s.recompute == "full":  # checkpoints leave the GPU only where they are partitioned
        cpu = s.checkpoints_on == "cpu"
        config["activation_checkpointing"] = {
            "partition_activations": cpu,
            "cpu_checkpointing": cpu,
        }
    return config
