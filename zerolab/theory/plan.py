"""plan(model, cluster, strategy): what goes where, does it fit, what bounds the step.

Memory is exact for states and an interval for the rest, shown apart. Times follow a model of the
machine, see `ASSUMES`: good for comparing plans, not for promising seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zerolab.theory import residual
from zerolab.theory.catalog import GPUS, Cluster, Model
from zerolab.theory.catalog import cluster as cluster_of
from zerolab.theory.catalog import model as model_of
from zerolab.theory.memory import KINDS, held_bytes, recipe_named
from zerolab.theory.notation import TIERS
from zerolab.theory.offload import cpu_adam_s
from zerolab.theory.residual import Residual
from zerolab.theory.strategy import Strategy
from zerolab.theory.timeline import Costs, Timeline, run, step_tasks
from zerolab.theory.traffic import sent_bytes

USED_OF_PEAK = 0.5
ASSUMES = (
    "half of the GPU's peak, 6 FLOPs per parameter and token (8 with full recomputation), full "
    "links, CPU-Adam at its paper's speed; no attention scores, latency, GPU optimizer or data"
)


@dataclass(frozen=True)
class Fit:
    """A tier's need, with the least and the most of the residual states, and its capacity.

    Bytes per rank on the GPU, per node on cpu and nvme.
    """

    tier: str
    states_bytes: int
    low_bytes: int
    high_bytes: int
    capacity_bytes: int

    @property
    def verdict(self) -> str:
        if self.low_bytes > self.capacity_bytes:
            return "does not fit"
        return "fits" if self.high_bytes <= self.capacity_bytes else "tight"


@dataclass(frozen=True)
class Plan:
    """One rank: bytes held by kind and where, bytes sent by collective, what fits, the step."""

    model: Model
    cluster: Cluster
    strategy: Strategy
    ranks: int  # data-parallel
    params: int  # per tensor-parallel rank
    held: dict[str, int]
    sent: dict[str, int]
    tiers: dict[str, str]  # where each kind of state stays
    residuals: tuple[Residual, ...]
    fits: tuple[Fit, ...]

    @cached_property
    def timeline(self) -> Timeline | None:
        """The step's timeline, or None where a speed that it needs is not given."""
        return _timeline(self)

    @property
    def leaves_out(self) -> str:
        alone = recipe_named(self.strategy.recipe).leaves_out
        return f"what is listed besides; assumes {ASSUMES}" if self.residuals else alone

    @property
    def verdict(self) -> str:
        """The worst of the tiers; "unknown" where no capacity is given."""
        found = {fit.verdict for fit in self.fits}
        return next((v for v in ("does not fit", "tight", "fits") if v in found), "unknown")

    @property
    def tokens_per_s(self) -> float:
        s, tokens = self.strategy, self.strategy.sequence or self.model.sequence
        step = tokens * s.micro_batch * s.accumulation * self.ranks
        return step / self.timeline.total_s if self.timeline else 0.0

    @property
    def sent_s(self) -> float | None:
        """Seconds to send all at the rate of the link; None where no link is known."""
        ring = (self.strategy.group or self.ranks) * self.strategy.tensor_parallel
        link = self.cluster.link_bytes_per_s(ring)
        return self.sent["total"] / link if link else None


def _volumes(
    s: Strategy, ranks: int, params: int, units: Sequence[int] | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Held and sent bytes, with frozen parameters and hybrid groups."""
    if s.frozen >= params:
        raise ValueError(f"At most {params - 1} of {params} parameters can be frozen.")
    group, trains = s.group or ranks, params - s.frozen
    units = None if s.frozen else units
    travel = (s.accumulation, s.reduce_bytes)
    held = held_bytes(s.stage, group, trains, s.recipe, units)
    sent = sent_bytes(s.stage, group, trains, s.recipe, units, *travel)
    if s.frozen:
        more = held_bytes(s.stage, group, s.frozen, s.recipe)
        moved = sent_bytes(s.stage, group, s.frozen, s.recipe, None, *travel)
        held["parameters"] += more["parameters"]
        sent["all_gather"] += moved["all_gather"] if s.stage == 3 else 0
        if not s.frozen_apart:
            held["gradients"] += more["gradients"]
            sent["all_reduce"] += moved["all_reduce"]
            sent["reduce_scatter"] += moved["reduce_scatter"]
    if group < ranks:  # owners of the same shard add their gradients: an all-reduce across groups
        shard = -(-trains // group)
        across = sent_bytes(0, ranks // group, shard, s.recipe, reduce_bytes=s.reduce_bytes)
        sent["all_reduce"] += across["total"] * (s.accumulation if s.stage > 1 else 1)
    held["total"] = sum(held[kind] for kind in KINDS)
    sent["total"] = sum(size for name, size in sent.items() if name != "total")
    return held, sent


def _residuals(m: Model, c: Cluster, s: Strategy, params: int) -> tuple[Residual, ...]:
    r, found = recipe_named(s.recipe), []
    reduce = r.reduce_bytes if s.reduce_bytes is None else s.reduce_bytes
    if m.layers:
        shape = (m.layers, m.hidden, m.heads, s.sequence or m.sequence, s.micro_batch)
        size = residual.activation_bytes(*shape, s.recompute, s.activations, s.tensor_parallel)
        found.append(Residual("activations", size, size, s.activations, s.checkpoints_on))
    if m.layers and s.stage == 3:
        units = [-(-unit // s.tensor_parallel) for unit in m.units]
        size, whole = residual.gathered_bytes(units, r, s.prefetch), max(units) * reduce
        found.append(Residual("gathered units", size, size, "FSDP §3.2.1"))
        found.append(Residual("whole gradients of a unit", whole, whole, "FSDP §3.2.1"))
    elif c.gpu and c.gpus > s.tensor_parallel:
        found.append(residual.fused_buffer(params, s.stage > 0, reduce if s.stage else 4))
    if c.gpu:
        found += [residual.CONTEXT, residual.fragmentation(GPUS[c.gpu].memory_bytes)]
    return tuple(found)


def _fits(
    c: Cluster, held: dict[str, int], tiers: dict[str, str], residuals: Sequence[Residual]
) -> tuple[Fit, ...]:
    capacities, found = (GPUS[c.gpu].memory_bytes if c.gpu else 0, c.cpu_bytes, c.nvme_bytes), []
    for tier, capacity in zip(TIERS, capacities, strict=True):
        times = 1 if tier == "gpu" else c.gpus_per_node
        rest = [r for r in residuals if r.tier == tier]
        states = sum(held[kind] for kind in KINDS if tiers[kind] == tier) * times
        low = states + times * sum(r.low for r in rest)
        high = states + times * sum(r.high for r in rest)
        if capacity and high:
            found.append(Fit(tier, states, low, high, capacity))
    return tuple(found)


def _timeline(p: Plan) -> Timeline | None:
    m, c, s = p.model, p.cluster, p.strategy
    tokens, group = s.micro_batch * (s.sequence or m.sequence), s.group or p.ranks
    if not c.gpu or not tokens:
        return None
    link = c.link_bytes_per_s(group * s.tensor_parallel)
    disk = c.nvme_bytes_per_s / c.gpus_per_node
    speed = {"gpu": float("inf"), "cpu": c.host_bytes_per_s, "nvme": disk}
    if not all(speed[on] for on in (s.optimizer_on, s.parameters_on, s.checkpoints_on)) or not link:
        return None
    work = 2 * m.active_params / s.tensor_parallel * tokens  # FLOPs of a forward pass
    forward = work / (GPUS[c.gpu].flops_per_s * USED_OF_PEAK)
    off, shard = s.optimizer_on != "gpu", p.params // (group if s.stage else 1)
    to_host = 2 * shard / speed["cpu"] if off else 0
    kept = next((r.low for r in p.residuals if r.tier == "cpu"), 0)
    states = p.held["optimizer_states"] / speed["nvme"] if s.optimizer_on == "nvme" else 0
    reduces = s.accumulation if s.stage > 1 else 1
    between = c.link_bytes_per_s(c.gpus) or link  # one shard's owners may sit in several nodes
    across = p.sent["all_reduce"] / (between if s.group else link)
    gathered = p.sent["all_gather"] / link
    costs = Costs(
        forward=forward,
        backward=forward * (3 if s.recompute == "full" else 2),
        gather=gathered / (2 * s.accumulation) if s.stage == 3 else 0,
        fetch=p.held["parameters"] / speed[s.parameters_on],
        fetch_from="disk" if s.parameters_on == "nvme" else "host link",
        reduce=(p.sent["reduce_scatter"] / link + across) / reduces,
        reduce_every=s.stage > 1,
        final_gather=gathered if s.stage < 3 else 0,
        checkpoints=kept / speed["cpu"] if kept else 0,
        down=to_host,
        read=states,
        optimizer=cpu_adam_s(shard * c.gpus_per_node) if off else 0,
        write=states,
        up=to_host if s.parameters_on == "gpu" else 0,
    )  # fmt: skip
    tasks = step_tasks(costs, min(m.layers or 1, 8), s.prefetch, s.accumulation)
    return run(tasks, s.overlap)


def plan(
    model: str | float | Model,
    cluster: str | int | Cluster,
    strategy: Strategy | int = 0,
    units: Sequence[int] | None = None,
) -> Plan:
    """A plan for a catalogued model on known nodes, or for bare numbers of both.

    `plan("llama2-7b", "dgx-a100", Strategy(stage=3))`, or `plan(7.5e9, 64, 1)` for stage 1.
    ValueError in one sentence where something is impossible.
    """
    s = strategy if isinstance(strategy, Strategy) else Strategy(strategy)
    m, c = model_of(model, s.tied), cluster_of(cluster)
    s.check(c)
    data_parallel, size = c.gpus // s.tensor_parallel, -(-m.params // s.tensor_parallel)
    held, sent = _volumes(s, data_parallel, size, units)
    gradients_on = "cpu" if s.optimizer_on != "gpu" and s.stage >= 2 else "gpu"
    tiers = dict(zip(KINDS, (s.parameters_on, gradients_on, s.optimizer_on), strict=True))
    residuals = _residuals(m, c, s, size)
    fits = _fits(c, held, tiers, residuals)
    return Plan(m, c, s, data_parallel, size, held, sent, tiers, residuals, fits)
