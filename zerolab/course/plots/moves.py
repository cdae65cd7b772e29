"""What is sent, when, and between which tiers: traffic, schedules, timelines, the hierarchy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from zerolab.course.plots.base import COLORS, SLANTED, bar, bare, legend, spans, style
from zerolab.theory.timeline import STREAMS, Timeline

# A collective is drawn in the colour of what it carries.
CARRIES = {"all_reduce": "gradients", "reduce_scatter": "gradients", "all_gather": "parameters"}
WIDEST = 150  # % of a tier's capacity: what needs more is cut off here, and said in words
# the first word of a task's name in `theory.timeline` -> legend, kind, hatch
TASKS = {
    "gather": ("gather parameters", "parameters", ""),
    "final": ("gather parameters", "parameters", ""),
    "reduce": ("reduce gradients", "gradients", ""),
    "fetch": ("copy parameters", "parameters", "copy"),
    "up": ("copy parameters", "parameters", "copy"),
    "down": ("copy gradients", "gradients", "copy"),
    "keep": ("copy checkpoints", "activations", "copy"),
    "read": ("read or write states", "optimizer_states", "copy"),
    "write": ("read or write states", "optimizer_states", "copy"),
    "update": ("update on the CPU", "optimizer_states", ""),
}


def _collective(name: str) -> dict[str, Any]:
    return style(CARRIES[name], name)


def traffic_bars(
    ax: Axes, rows: Mapping[str, Mapping[str, float]], unit: str = "bytes per parameter"
) -> Axes:
    """Bytes sent per rank and step, one bar a stage, stacked by collective."""
    for place, row in enumerate(rows.values()):
        left = 0.0
        for name in (n for n in CARRIES if row.get(n)):
            ax.barh(place, float(row[name]), left=left, **_collective(name))
            left += float(row[name])
        ax.text(left, place, f" {left:.4g}", va="center")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlabel(f"{unit}, sent per rank and step")
    ax.set_xlim(0, 1.14 * max(sum(map(float, row.values())) for row in rows.values()) or 1)
    used = [name for name in CARRIES if any(row.get(name) for row in rows.values())]
    legend(ax, [(name.replace("_", "-"), _collective(name)) for name in used])
    return bare(ax)


def collective_schedule(
    ax: Axes, ranks: int, moments: Sequence[tuple[str, str, float]], unit: str = "bytes"
) -> Axes:
    """The moments of a step as columns, ranks as rows: who takes part in which collective.

    moments   (what happens, its collective or "", bytes that each rank sends in it)
    """
    for place, (_, collective, sent) in enumerate(moments):
        how = _collective(collective) if collective else style("compute")
        ax.bar(place, ranks * bool(collective), 0.9, -0.5, **how)
        for rank in range(ranks):
            if collective:
                ax.text(place, rank, f"{sent:,.6g}", ha="center", va="center", fontsize=8,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
            else:
                ax.bar(place, 0.24, 0.9, rank - 0.12, **how)
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.set_ylim(ranks - 0.4, -0.6)
    ax.set_xlim(-0.6, len(moments) - 0.4)
    ax.set_xticks(range(len(moments)), [name for name, _, _ in moments], **SLANTED)
    used = [name for name in CARRIES if any(name == which for _, which, _ in moments)]
    parts = [(f"{name.replace('_', '-')}, {unit} sent", _collective(name)) for name in used]
    legend(ax, [("works alone", style("compute")), *parts])
    return bare(ax, "left")


def _task(name: str) -> tuple[str, str, str]:
    """How a task of `theory.timeline` is called and drawn; forward is 0.f3, backward 0.b3."""
    word = name.split()[0]
    backward = "." in word and word.split(".")[1].startswith("b")
    return TASKS.get(
        word, ("backward", "compute", "backward") if backward else ("forward", "compute", "")
    )


def timeline(ax: Axes, line: Timeline, title: str = "", longest_s: float = 0) -> Axes:
    """A step's tasks on their streams against time; `longest_s` fixes the scale."""
    placed = [p for p in line.placed if p.end_s > p.start_s]
    streams = [stream for stream in STREAMS if line.busy_s(stream)]
    end, factor = max(line.total_s, longest_s) or 1, 1.0
    unit = next((u for u, least in (("s", 1), ("ms", 1e-3)) if end >= least), "µs")
    factor = {"s": 1, "ms": 1e3, "µs": 1e6}[unit]
    rows: dict[tuple[str, str, str, bool], list[tuple[float, float]]] = {}
    for p in placed:
        thin = p.end_s - p.start_s < 0.02 * end  # a white edge would hide it
        row = rows.setdefault((p.task.stream, *_task(p.task.name)[1:], thin), [])
        row.append((factor * p.start_s, factor * (p.end_s - p.start_s)))
    for (stream, kind, hatch, thin), pieces in rows.items():
        how = style(kind, hatch)
        edge = {"edgecolor": how["facecolor"], "hatch": ""} if thin else {}
        spans(ax, pieces, streams.index(stream), 0.8, **{**how, "linewidth": 0.5, **edge})
    ax.axvline(factor * line.total_s, color="black", linestyle="--")
    ax.text(factor * line.total_s, len(streams) - 0.45, f" {factor * line.total_s:.4g} {unit}",
            va="bottom")  # fmt: skip
    ax.set_yticks(range(len(streams)), streams)
    ax.set_ylim(len(streams) - 0.4, -0.6)
    ax.set_xlim(0, 1.16 * factor * end)
    ax.set_xlabel(unit)
    ax.locator_params(axis="x", nbins=6)
    ax.set_title(title, loc="left", fontsize=10)
    return bare(ax)


def timeline_legend(ax: Axes, *lines: Timeline, lift: float = 0) -> None:
    """Names of all that stands in these timelines, above the axes."""
    names = [p.task.name for line in lines for p in line.placed if p.end_s > p.start_s]
    drawn = dict.fromkeys(_task(name) for name in names)
    legend(ax, [(name, style(kind, hatch)) for name, kind, hatch in drawn], lift)


def offload_hierarchy(
    ax: Axes, tiers: Sequence[tuple[str, Mapping[str, float], float]], edges: Sequence[str] = ()
) -> Axes:
    """Each tier's bar as a share of its capacity, stacked by kind; what crosses, between them.

    tiers   (name, kind -> bytes, capacity in bytes), the fastest first
    edges   a line of words for each gap between two tiers
    """
    for place, (_, held, capacity) in enumerate(tiers):
        left = 0.0
        for kind in (k for k in COLORS if held.get(k)):
            share = 100 * float(held[kind]) / capacity
            bar(ax, left, 2 * place, share, 0.9, **style(kind))
            left += share
        words = f"{sum(held.values()) / 1e9:,.1f} of {capacity / 1e9:,.0f} GB, {left:,.0f} %"
        ax.text(WIDEST, 2 * place, f" {words}", va="center")
    for place, words in enumerate(edges):
        ax.text(0, 2 * place + 1, f"↕ {words}" if words else "", va="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
    ax.axvline(100, color="black", linestyle="--", zorder=0.5)
    ax.set_yticks(range(0, 2 * len(tiers), 2), [name for name, _, _ in tiers])
    ax.set_ylim(2 * len(tiers) - 1.3, -0.7)
    ax.set_xlim(0, WIDEST)
    ax.set_xticks([0, 50, 100])
    ax.set_xlabel("% of the tier's capacity")
    kinds = [kind for kind in COLORS if any(held.get(kind) for _, held, _ in tiers)]
    legend(ax, [(kind.replace("_", " "), style(kind)) for kind in kinds], width=1.55)
    return bare(ax)
