"""Communication and overlap explorer: what a step takes with its transfers hidden, or not."""

from __future__ import annotations

from zerolab.course.plots.moves import timeline, timeline_legend
from zerolab.course.search import gigabytes
from zerolab.course.widgets.base import Explorer, View, canvas, chooser, numbered, slider
from zerolab.theory import catalog
from zerolab.theory.catalog import MODELS, Cluster
from zerolab.theory.notation import STAGES
from zerolab.theory.plan import Plan, plan
from zerolab.theory.strategy import Strategy
from zerolab.theory.timeline import Timeline

GPU = "a100-80"
SEQUENCE = 2048  # tokens, or as many as the model can
LINKS_GB = [1, 2, 5, 12, 25, 50, 100, 150, 235, 300, 450]
BATCHES = [1, 2, 4, 8, 16, 32]
RANKS = [2, 4, 8, 16, 32, 64, 128, 256]


def overlap_plans(
    model: str, stage: int, ranks: int, link_gb: int, batch: int, prefetch: int
) -> tuple[Plan, Plan]:
    """One step planned without and with overlap; the link in GB/s, one way, for each rank."""
    cluster = Cluster(f"{ranks} GPUs", ranks, gpu=GPU, rank_bytes_per_s=link_gb * 1e9)
    tokens = min(SEQUENCE, catalog.model(model).sequence)
    without, overlapped = (
        plan(model, cluster, Strategy(stage, micro_batch=batch, sequence=tokens,
                                      prefetch=prefetch, overlap=overlap))
        for overlap in (False, True)
    )  # fmt: skip
    return without, overlapped


def overlap_view(
    model: str, stage: int, ranks: int, link_gb: int, batch: int, prefetch: int
) -> View:  # fmt: skip
    """Two timelines of one step on one scale, and what overlap gains."""
    plans = overlap_plans(model, stage, ranks, link_gb, batch, prefetch)
    serial, overlapped = (_timed(p) for p in plans)
    boxes = (0.12, 0.585, 0.86, 0.2), (0.12, 0.15, 0.86, 0.2)
    figure, (above, below) = canvas(7.2, 3.2, *boxes)
    longest = serial.total_s
    timeline(above, serial, "one after the other", longest)
    above.set_xticks([])  # the scale is that of the timeline below
    above.set_xlabel("")
    timeline(below, overlapped, "overlapped", longest)
    timeline_legend(above, serial, lift=0.26)
    both = (serial, overlapped)
    table = (
        ("seconds", "one after the other", "overlapped"),
        ("compute at work", *(f"{line.busy_s('compute'):.4g}" for line in both)),
        ("network at work", *(f"{line.busy_s('network'):.4g}" for line in both)),
        ("the step", *(f"{line.total_s:.4g}" for line in both)),
        ("sent per rank", *(gigabytes(p.sent["total"]) for p in plans)),
    )
    return View.of(figure, _words(plans[1].strategy, serial, overlapped), table)


def _timed(p: Plan) -> Timeline:
    if p.timeline is None:
        raise ValueError(f"{p.model.name} cannot be timed: choose a model with layers.")
    return p.timeline


def _words(s: Strategy, serial: Timeline, overlapped: Timeline) -> str:
    gain = serial.total_s / overlapped.total_s
    busy = overlapped.busy_s(overlapped.bound) / overlapped.total_s
    words = (f"With {s.micro_batch} x {s.sequence:,} tokens on each {GPU} a step takes "
             f"{serial.total_s:.4g} s one after the other and {overlapped.total_s:.4g} s "
             f"overlapped: {gain:.2f} times faster, where two streams can gain 2.00 at most. The "
             f"{overlapped.bound} has the most work and is busy {busy:.0%} of the overlapped "
             "step.")  # fmt: skip
    if overlapped.bound == "network":
        words += " A faster link or a larger batch would shorten it per token."
    if s.stage < 3:
        words += " Prefetch changes nothing below stage 3: no parameters are gathered on the way."
    elif s.prefetch == 0:
        words += " Without prefetch every gather waits for the unit before it."
    return words


def overlap_explorer(
    model: str = "llama2-7b", stage: int = 3, ranks: int = 8, link_gb: int = 25, batch: int = 4,
    prefetch: int = 1,
) -> Explorer:  # fmt: skip
    """Link, batch and prefetch against the time of a step."""
    controls = {
        "model": chooser("model", list(MODELS), model),
        "stage": slider("stage", numbered(STAGES), stage),
        "ranks": slider("ranks", numbered(RANKS), ranks),
        "link_gb": slider("link, one way", numbered(LINKS_GB, " GB/s"), link_gb),
        "batch": slider("sequences per rank", numbered(BATCHES), batch),
        "prefetch": slider("units ahead", numbered(range(4)), prefetch),
    }
    return Explorer("Communication and overlap explorer", controls, overlap_view)
