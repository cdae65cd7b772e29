"""What is held: by kind, by rank, against ranks, inside a step, element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from zerolab.course.plots.base import COLORS, LINES, SLANTED, bar, bare, legend, spans, style


def _named(kinds: Iterable[str]) -> list[str]:
    """The kinds among these, in stacking order."""
    wanted = set(kinds)
    return [kind for kind in COLORS if kind in wanted]


def held_bars(
    ax: Axes,
    rows: Mapping[str, Mapping[str, float]],
    unit: str = "bytes per parameter",
    capacity: float = 0,
) -> Axes:
    """One horizontal bar a row (a rank, a stage), stacked by kind of state.

    A `capacity` is drawn as a line that a bar should not cross.
    """
    for place, row in enumerate(rows.values()):
        left = 0.0
        for kind in (k for k in COLORS if row.get(k)):
            bar(ax, left, place, float(row[kind]), **style(kind))
            left += float(row[kind])
        ax.text(left, place, f" {left:.4g}", va="center")
    longest = max(sum(float(row.get(kind, 0)) for kind in COLORS) for row in rows.values())
    if capacity:
        ax.axvline(capacity, color="black", linestyle="--")
        ax.text(capacity, -0.46, f" capacity {capacity:g}", va="bottom")
        longest = max(longest, 1.1 * capacity)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.8 if capacity else -0.5)
    ax.set_xlabel(unit)
    ax.set_xlim(0, 1.14 * longest or 1)
    kinds = _named(kind for row in rows.values() for kind, size in row.items() if size)
    legend(ax, [(kind.replace("_", " "), style(kind)) for kind in kinds])
    return bare(ax)


def held_against_ranks(
    ax: Axes, curves: Mapping[str, tuple[list[int], list[float]]], unit: str = "bytes per parameter"
) -> Axes:
    """Bytes against the number of ranks, one line for each stage, told apart by its marks."""
    colors = [COLORS[k] for k in ("parameters", "gradients", "optimizer_states", "activations")]
    for (name, (ranks, held)), line, color in zip(curves.items(), LINES, colors, strict=False):
        ax.plot(ranks, held, line, label=name, color=color)
        ax.set_xscale("log", base=2)
        ax.set_xticks(ranks, [str(n) for n in ranks])
    ax.set_ylim(0)
    ax.set_xlabel("ranks")
    ax.set_ylabel(unit)
    ax.legend(frameon=False)
    return bare(ax)


def memory_over_step(
    ax: Axes, moments: Sequence[tuple[str, Mapping[str, float]]], unit: str = "bytes"
) -> Axes:
    """What one rank holds at each moment of a step, stacked by kind; the highest is marked."""
    totals = []
    for place, (_, held) in enumerate(moments):
        bottom = 0.0
        for kind in (k for k in COLORS if held.get(k)):
            ax.bar(place, float(held[kind]), 0.9, bottom=bottom, **style(kind))
            bottom += float(held[kind])
        totals.append(bottom)
    peak = max(totals)
    ax.text(totals.index(peak), peak, f"peak {peak:,.6g}", ha="center", va="bottom")
    ax.set_ylim(0, 1.15 * peak or 1)
    ax.set_xlim(-0.6, len(moments) - 0.4)
    ax.set_xticks(range(len(moments)), [name for name, _ in moments], **SLANTED)
    ax.set_ylabel(unit)
    kinds = _named(kind for _, held in moments for kind, size in held.items() if size)
    legend(ax, [(kind.replace("_", " "), style(kind)) for kind in kinds])
    return bare(ax)


def _widths(ranges: Iterable[tuple[int, int]]) -> list[tuple[float, float]]:
    return [(start, stop - start) for start, stop in ranges]


def shard_map(
    ax: Axes,
    parameters: Sequence[tuple[str, int, int]],
    ranks: Sequence[Mapping[str, Sequence[tuple[int, int]]]],
    sent: Mapping[str, Sequence[Sequence[tuple[int, int]]]] | None = None,
) -> Axes:
    """Which rank holds which element of which parameter, for each kind of state.

    parameters   (name, start, stop) in the flat buffer; a name of "" is padding
    ranks        by rank: kind -> the ranges (start, stop) that it holds
    sent         kind -> by rank: the ranges that it sends at this moment, framed in black
    """
    kinds = ("parameters", "gradients", "optimizer_states")
    length = max(stop for _, _, stop in parameters)
    for rank, held in enumerate(ranks):
        for lane, kind in enumerate(kinds):
            place = 4 * rank + lane
            spans(ax, [(0, length)], place, 0.86, facecolor="white", edgecolor="#8a8a8a",
                  linewidth=0.6)  # fmt: skip
            for name in (kind, *(["gathered"] if kind == "parameters" else [])):
                if pieces := _widths(held.get(name, ())):
                    spans(ax, pieces, place, 0.86, **style(name))
            if pieces := _widths((sent or {}).get(kind, [()] * len(ranks))[rank]):
                spans(ax, pieces, place, 0.86, facecolor="none", edgecolor="black", linewidth=2.2)
    ax.set_yticks(
        [4 * rank + lane for rank in range(len(ranks)) for lane in range(3)],
        [f"rank {rank}   {letter}" if letter == "P" else letter
         for rank in range(len(ranks)) for letter in "PGO"],
    )  # fmt: skip
    for name, start, stop in parameters:
        label = name or "pad"
        ax.text((start + stop) / 2, -0.9, label, ha="center", va="bottom", fontsize=9,
                rotation=0 if stop - start > len(label) / 3 else 90)  # fmt: skip
    low, high = -0.6, 4 * len(ranks) - 1.4
    edges = sorted({edge for _, start, stop in parameters for edge in (start, stop)})
    ax.vlines(edges, low, high, color="black", linewidth=0.6, linestyle=":")
    ax.set_ylim(high, low)
    ax.set_xlim(0, length)
    ax.set_xlabel("element of the flat buffer   (P parameters, G gradients, O optimizer states)")
    ax.tick_params(axis="y", length=0)
    return bare(ax, "left", "bottom")
