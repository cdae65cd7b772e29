"""Figures from numbers: plot functions take an `ax` and return it, `show` displays a figure.

One colour for each kind of state, in every figure; the colours differ in lightness too, and every
part carries its name, so that nothing is said by colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, TypeGuard

import matplotlib.pyplot as plt
from IPython.display import Markdown, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLORS = {
    "parameters": "#0b4f8a",
    "gradients": "#d98200",
    "optimizer_states": "#6fb7a4",
    "activations": "#b04a86",
    "temporary": "#9a9a9a",
}
FIGURE_DATA = "application/vnd.zerolab.figure+json"


def new_axes(width: float = 7, height: float = 3) -> Axes:
    """Axes of a figure of its own, sizes in inches; `show(ax.figure, …)` displays it."""
    figure, ax = plt.subplots(figsize=(width, height), layout="constrained")
    plt.close(figure)  # shown by `show` alone, not a second time at the end of the cell
    return ax


def held_bars(
    ax: Axes, rows: Mapping[str, Mapping[str, float]], unit: str = "bytes per parameter"
) -> Axes:
    """One horizontal bar a row (a rank, a stage), stacked by kind of state."""
    names = list(rows)
    for place, name in enumerate(names):
        left = 0.0
        for kind in (k for k in COLORS if rows[name].get(k)):
            size = float(rows[name][kind])
            ax.barh(place, size, left=left, color=COLORS[kind], edgecolor="white",
                    label=kind.replace("_", " "))  # fmt: skip
            left += size
        ax.text(left, place, f" {left:.4g}", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.set_xlim(0, 1.12 * max(sum(map(float, row.values())) for row in rows.values()))
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(handles.values(), handles.keys(), ncols=3, loc="lower center",
              bbox_to_anchor=(0.5, 1), frameon=False)  # fmt: skip
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def held_against_ranks(ax: Axes, curves: Mapping[str, tuple[list[int], list[float]]]) -> Axes:
    """Bytes per parameter against the number of ranks, one line for each stage."""
    for (name, (ranks, held)), style in zip(
        curves.items(), ("-o", "--s", "-.^", ":d"), strict=False
    ):
        ax.plot(ranks, held, style, label=name, color="#0b4f8a" if style == "-o" else None)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [str(n) for n in ranks])
    ax.set_ylim(0)
    ax.set_xlabel("ranks")
    ax.set_ylabel("bytes per parameter")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def show(figure: Figure, description: str) -> None:
    """Displays a figure, its numbers (for machines that compare), and what it shows in words.

    The description stands below the picture as text: JupyterLab gives pictures no alternative
    text of their own.
    """
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    data = {"image/png": png.getvalue(), "text/plain": description, FIGURE_DATA: numbers_of(figure)}
    display(data, raw=True)
    display(Markdown(f"*{description}*"))


def numbers_of(figure: Figure) -> list[dict[str, Any]]:
    """What a figure's bars and lines stand at, to six digits, axes by axes."""
    return [
        {
            "bars": [_rounded(bar.get_bbox().bounds) for bar in ax.patches if _is_bar(bar)],
            "lines": [[_rounded(numbers) for numbers in line.get_data()] for line in ax.lines],
        }
        for ax in figure.axes
    ]


def _is_bar(patch: Any) -> TypeGuard[Rectangle]:
    return isinstance(patch, Rectangle)


def _rounded(numbers: Any) -> list[float]:
    return [float(f"{float(number):.6g}") for number in numbers]
