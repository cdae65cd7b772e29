"""Colours, axes, and how a figure is shown: picture, numbers and words together."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
from IPython.display import Markdown, display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from zerolab.course.plots.quick import QuickCanvas

# Each at least 3:1 against white (WCAG 1.4.11), and told apart from the others with any of the
# three common colour-vision deficiencies; tests/test_plots.py computes both. In stacking order.
COLORS = {
    "parameters": "#0438b6",
    "gathered": "#0438b6",  # parameters that are whole for a moment: hatched
    "gradients": "#c96607",
    "optimizer_states": "#0f9a5c",
    "activations": "#6c0862",
    "temporary": "#656468",
    "compute": "#171719",
}
HATCHES = {"gathered": "////", "backward": "\\\\\\\\", "all_reduce": "xxxx", "copy": "////"}
LINES = ("-o", "--s", "-.^", ":d")  # a line is known by its dashes and its marks
SLANTED: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor", "fontsize": 8}
LEGEND = "legend"  # what is drawn for it is no number of the figure
FIGURE_DATA = "application/vnd.zerolab.figure+json"


def figure_of(
    width: float, height: float, boxes: Sequence[tuple[float, float, float, float]], dpi: int = 100
) -> tuple[Figure, list[Axes]]:
    """A figure, sizes in inches, with axes at fixed places (left, bottom, width, height).

    Places are parts of the whole. Nothing is laid out anew when it is drawn, which makes this the
    quickest figure to redraw.
    """
    figure = Figure(figsize=(width, height), dpi=dpi)
    QuickCanvas(figure)
    return figure, [figure.add_axes(box) for box in boxes]


def new_axes(width: float = 7, height: float = 3) -> Axes:
    """Axes of a figure of its own, sizes in inches; `show(ax.figure, …)` displays it."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def style(kind: str, hatch: str = "") -> dict[str, Any]:
    """How a kind is drawn: its colour, its hatch in white."""
    hatch = HATCHES.get(hatch or kind, "")
    return {"facecolor": COLORS[kind], "hatch": hatch, "edgecolor": "white", "linewidth": 0.8}


def bare(ax: Axes, *more: str) -> Axes:
    """The axes without the sides that say nothing."""
    ax.spines[["top", "right", *more]].set_visible(False)
    return ax


def bar(ax: Axes, left: float, row: float, width: float, height: float = 0.8, **how: Any) -> None:
    """One bar across; quicker than `barh`, which adapts the limits: here they are set anyway."""
    ax.add_artist(Rectangle((left, row - height / 2), width, height, **how))


def spans(
    ax: Axes, pieces: Iterable[tuple[float, float]], place: float, height: float, **how: Any
) -> None:
    """Bars (start, width) in one row as one artist, which is drawn faster than many."""
    low, high = place - height / 2, place + height / 2
    boxes = [[(x, low), (x, high), (x + w, high), (x + w, low)] for x, w in pieces]
    ax.add_collection(PolyCollection(boxes, **how), autolim=False)


def legend(
    ax: Axes, parts: Iterable[tuple[str, dict[str, Any]]], lift: float = 0, width: float = 1
) -> None:
    """Names of the parts in rows above the axes, up to `width` axes wide; `lift` is in inches.

    Drawn by hand, since matplotlib's own legend takes a third of the time of a whole figure.
    """
    inch = ax.figure.dpi / ax.bbox.width, ax.figure.dpi / ax.bbox.height  # in parts of the axes
    rows: list[list[tuple[float, str, dict[str, Any]]]] = [[]]
    at = 0.0
    for name, how in parts:
        wide = 0.48 + 0.082 * len(name)  # inches: swatch, letters of ten points, a gap
        if rows[-1] and (at + wide - 0.2) * inch[0] > width:
            rows.append([])
            at = 0.0
        rows[-1].append((at * inch[0], name, how))
        at += wide
    for number, row in enumerate(reversed(rows)):
        y = 1 + (lift + 0.12 + 0.2 * number) * inch[1]
        for x, name, how in row:
            corner, size = (x, y - 0.05 * inch[1]), (0.22 * inch[0], 0.1 * inch[1])
            swatch = Rectangle(corner, *size, transform=ax.transAxes, clip_on=False, gid=LEGEND)
            swatch.set(**how)
            ax.add_artist(swatch)
            ax.text(x + 0.28 * inch[0], y, name, transform=ax.transAxes, va="center", gid=LEGEND)


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG, packed lightly: seeing it soon matters more than its size."""
    canvas, png = cast(FigureCanvasAgg, figure.canvas), io.BytesIO()
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    drawn.convert("RGB").save(png, "png", compress_level=1)  # its ground hides all that is behind
    return png.getvalue()


def show(figure: Figure, description: str) -> None:
    """Displays a figure, its numbers (for machines that compare), and what it shows in words.

    The description stands below the picture as text: JupyterLab gives pictures no alternative
    text of their own.
    """
    data = {
        "image/png": png_of(figure),
        "text/plain": description,
        FIGURE_DATA: numbers_of(figure),
    }
    display(data, raw=True)
    display(Markdown(f"*{description}*"))


def numbers_of(figure: Figure) -> list[dict[str, Any]]:
    """What a figure's bars and lines stand at, to six digits, axes by axes."""
    found = []
    for ax in figure.axes:
        numbers: dict[str, Any] = {
            "bars": [_rounded(bar.get_bbox().bounds) for bar in ax.patches if _is_bar(bar)],
            "lines": [[_rounded(numbers) for numbers in line.get_data()] for line in ax.lines],
        }
        if rows := [row for row in ax.collections if isinstance(row, PolyCollection)]:
            numbers["spans"] = [[_extent(path.vertices) for path in row.get_paths()]
                                for row in rows]  # fmt: skip
        found.append(numbers)
    return found


def _is_bar(patch: Any) -> TypeGuard[Rectangle]:
    return isinstance(patch, Rectangle) and patch.get_gid() != LEGEND


def _extent(corners: Any) -> list[float]:
    """(points, 2) -> left, bottom, width, height."""
    low, high = corners.min(0), corners.max(0)
    return _rounded([*low, *(high - low)])


def _rounded(numbers: Any) -> list[float]:
    return [float(f"{float(number):.6g}") for number in numbers]
