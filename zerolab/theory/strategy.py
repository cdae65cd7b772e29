"""What one decides: stage, recipe, where each state lives, batch, recomputation, sharding group."""

from dataclasses import dataclass

from zerolab.theory.catalog import Cluster
from zerolab.theory.memory import DEFAULT_RECIPE, recipe_named, sharded_kinds
from zerolab.theory.notation import TIERS
from zerolab.theory.residual import RECOMPUTE
from zerolab.theory.values import one_of, whole

MOST_MICRO_BATCHES = 1024  # of a step: each has its tasks in the timeline


@dataclass(frozen=True)
class Strategy:
    """`sequence` 0 is the model's; `group` 0 shards over all data-parallel ranks.

    `frozen` parameters have no gradient and no optimizer state, unless they share their units with
    trainable ones (`frozen_apart=False`): then their gradients exist and travel as if they trained.
    `tied` None leaves the model's input and output tables as it was released.
    """

    stage: int = 0
    recipe: str = DEFAULT_RECIPE
    micro_batch: int = 1
    accumulation: int = 1
    sequence: int = 0
    recompute: str = "none"
    activations: str = "korthikanti"
    optimizer_on: str = "gpu"
    parameters_on: str = "gpu"
    checkpoints_on: str = "gpu"
    group: int = 0
    tensor_parallel: int = 1
    frozen: int = 0
    frozen_apart: bool = True
    tied: bool | None = None
    reduce_bytes: int | None = None
    prefetch: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        sharded_kinds(self.stage)
        recipe_named(self.recipe)
        one_of("Recomputation", self.recompute, RECOMPUTE)
        for name in ("micro_batch", "accumulation", "tensor_parallel"):
            whole(name, getattr(self, name), 1)
        if self.accumulation > MOST_MICRO_BATCHES:
            raise ValueError(f"accumulation must be at most {MOST_MICRO_BATCHES}.")
        for name in ("sequence", "group", "frozen", "prefetch"):
            whole(name, getattr(self, name))
        for what in ("optimizer_on", "parameters_on", "checkpoints_on"):
            one_of(what, getattr(self, what), TIERS)
        if self.optimizer_on != "gpu" and self.stage == 0:
            raise ValueError("Optimizer offload needs stage 1 or higher; stage 0 keeps all on GPU.")
        if self.optimizer_on == "nvme" and self.stage < 3:
            raise ValueError("NVMe offload needs stage 3; below it optimizer states may go to cpu.")
        if self.parameters_on != "gpu" and self.stage < 3:
            raise ValueError("Parameter offload needs stage 3; below it parameters stay on GPU.")
        kept = self.checkpoints_on
        if kept == "nvme" or (kept == "cpu" and self.recompute != "full"):
            raise ValueError("Activation checkpoints may go to cpu, with recompute='full'.")
        if self.group and self.stage == 0:
            raise ValueError("Hybrid sharding needs stage 1 or higher; stage 0 shards nothing.")

    def check(self, cluster: Cluster) -> None:
        """ValueError where the cluster cannot hold what is asked for."""
        asked = {self.optimizer_on, self.parameters_on, self.checkpoints_on}
        if self.optimizer_on == "nvme":
            asked.add("cpu")  # the update runs there, and gradients wait there
        for tier, capacity in (("cpu", cluster.cpu_bytes), ("nvme", cluster.nvme_bytes)):
            if tier in asked and not capacity:
                raise ValueError(f"Offload to {tier} needs its capacity: give {tier}_bytes.")
        ranks = cluster.gpus // self.tensor_parallel
        for n, parts in ((cluster.gpus, self.tensor_parallel), (ranks, self.group or 1)):
            if n % parts:
                raise ValueError(f"{n} ranks make no groups of {parts}: a divisor of {n} does.")
