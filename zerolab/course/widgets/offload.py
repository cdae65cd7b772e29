"""Offload planner: what lives on which tier, whether it fits, and what then bounds the step."""

from __future__ import annotations

from zerolab.course.plots.moves import offload_hierarchy, timeline, timeline_legend
from zerolab.course.search import gigabytes
from zerolab.course.widgets.base import Explorer, View, canvas, chooser, numbered, slider
from zerolab.theory import catalog
from zerolab.theory.catalog import MODELS, NODES
from zerolab.theory.notation import KINDS, STAGES, TIERS
from zerolab.theory.plan import Fit, Plan, plan
from zerolab.theory.strategy import Strategy
from zerolab.theory.timeline import STREAMS

SEQUENCE = 2048  # tokens, or as many as the model can
BATCHES = [1, 2, 4, 8, 16, 32]
SCHEDULES = ["overlapped", "one after the other"]
TIER_NAMES = {"gpu": "each GPU", "cpu": "CPU memory of a node", "nvme": "disks of a node"}


def offload_plan(
    model: str, node: str, stage: int, optimizer: str, parameters: str, checkpoints: str,
    batch: int, accumulation: int, schedule: str,
) -> Plan:  # fmt: skip
    """One node's plan; ValueError in one sentence for a tier that a stage cannot use."""
    tokens = min(SEQUENCE, catalog.model(model).sequence)
    strategy = Strategy(stage, optimizer_on=optimizer, parameters_on=parameters,
                        checkpoints_on=checkpoints, recompute="full", micro_batch=batch,
                        accumulation=accumulation, sequence=tokens,
                        overlap=schedule == SCHEDULES[0])  # fmt: skip
    return plan(model, node, strategy)


def tier_rows(p: Plan) -> list[tuple[str, dict[str, float], float]]:
    """Each tier that holds something: its name, bytes by kind (the least), its capacity.

    On CPU and disks the states of all GPUs of a node add up. What is no model state is temporary,
    activations apart.
    """
    rows = []
    for fit in p.fits:
        times = 1 if fit.tier == "gpu" else p.cluster.gpus_per_node
        held: dict[str, float] = {kind: times * p.held[kind] for kind in KINDS
                                  if p.tiers[kind] == fit.tier}  # fmt: skip
        for rest in (r for r in p.residuals if r.tier == fit.tier and r.low):
            kind = "activations" if rest.name == "activations" else "temporary"
            held[kind] = held.get(kind, 0) + times * rest.low
        rows.append((fit.tier, held, float(fit.capacity_bytes)))
    return rows


def crossings(p: Plan) -> list[str]:
    """What crosses between neighbouring tiers in a step, in words, with the seconds it takes."""
    if p.timeline is None:
        return ["", ""]
    c, found = p.cluster, []
    for stream, speed, whose in (("host link", c.host_bytes_per_s, "each GPU, each way"),
                                 ("disk", c.nvme_bytes_per_s, "the node")):  # fmt: skip
        busy = p.timeline.busy_s(stream)
        found.append(f"{speed / 1e9:g} GB/s for {whose}; busy {busy:.3g} s of a step"
                     if busy else "nothing crosses")  # fmt: skip
    return found


def offload_view(
    model: str, node: str, stage: int, optimizer: str, parameters: str, checkpoints: str,
    batch: int, accumulation: int, schedule: str,
) -> View:  # fmt: skip
    """The hierarchy with what lives where, and the timeline of the step."""
    p = offload_plan(model, node, stage, optimizer, parameters, checkpoints, batch, accumulation,
                     schedule)  # fmt: skip
    if p.timeline is None:
        raise ValueError("This step cannot be timed: a speed of the node is not known.")
    rows = tier_rows(p)
    boxes = (0.16, 0.57, 0.52, 0.33), (0.16, 0.09, 0.82, 0.25)
    figure, (above, below) = canvas(7.2, 5.4, *boxes)
    offload_hierarchy(above, rows, crossings(p)[: len(rows) - 1])
    timeline(below, p.timeline, "", p.timeline.total_s)
    timeline_legend(below, p.timeline)
    used = [stream for stream in STREAMS if p.timeline.busy_s(stream)]
    table = [("tier", "least", "most", "capacity", "verdict"),
             *((TIER_NAMES[f.tier], *map(gigabytes, (f.low_bytes, f.high_bytes, f.capacity_bytes)),
                f.verdict) for f in p.fits),
             ("stream", "busy", "of the step", "", ""),
             *((stream, f"{p.timeline.busy_s(stream):.4g} s",
                f"{p.timeline.busy_s(stream) / p.timeline.total_s:.0%}", "", "")
               for stream in used)]  # fmt: skip
    return View.of(figure, " ".join(_words(p)), tuple(table))


def _words(p: Plan) -> list[str]:
    assert p.timeline
    where = ", ".join(f"{kind.replace('_', ' ')} on {p.tiers[kind]}" for kind in KINDS)
    sentences = [f"{p.model.name} at stage {p.strategy.stage} on {p.cluster.name}: {where}."]
    sentences.append(f"Verdict: {p.verdict}.")
    worst = [fit for fit in p.fits if fit.verdict == "does not fit"]
    sentences += [_missing(fit) for fit in worst]
    batch = f"{p.strategy.micro_batch} x {p.strategy.sequence:,} tokens"
    sentences.append(f"With {batch} on each GPU and full recomputation a step takes "
                     f"{p.timeline.total_s:.4g} s, {p.tokens_per_s:,.0f} tokens/s; the "
                     f"{p.timeline.bound} has the most work.")  # fmt: skip
    return sentences


def _missing(fit: Fit) -> str:
    over = gigabytes(fit.low_bytes - fit.capacity_bytes)
    return f"{TIER_NAMES[fit.tier].capitalize()} would need {over} more."


def offload_planner(
    model: str = "llama2-70b", node: str = "dgx-a100", stage: int = 3, optimizer: str = "cpu",
    parameters: str = "gpu", checkpoints: str = "gpu", batch: int = 4, accumulation: int = 1,
    schedule: str = SCHEDULES[0],
) -> Explorer:  # fmt: skip
    """Tiers and schedule against what fits and what a step takes."""
    controls = {
        "model": chooser("model", list(MODELS), model),
        "node": chooser("node", list(NODES), node),
        "stage": slider("stage", numbered(STAGES), stage),
        "optimizer": chooser("optimizer states on", list(TIERS), optimizer),
        "parameters": chooser("parameters on", list(TIERS), parameters),
        "checkpoints": chooser("checkpoints on", list(TIERS[:2]), checkpoints),
        "batch": slider("sequences per rank", numbered(BATCHES), batch),
        "accumulation": slider("micro-batches", numbered([1, 2, 4, 8]), accumulation),
        "schedule": chooser("schedule", SCHEDULES, schedule),
    }
    return Explorer("Offload planner", controls, offload_view)
