"""Figures stand at the numbers that they were given, and can be read by everyone."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from zerolab.course.plots import (
    COLORS,
    FIGURE_DATA,
    HATCHES,
    collective_schedule,
    figure_of,
    held_against_ranks,
    held_bars,
    memory_over_step,
    new_axes,
    numbers_of,
    offload_hierarchy,
    shard_map,
    show,
    timeline,
    traffic_bars,
)
from zerolab.course.plots.base import LEGEND, SLANTED, style
from zerolab.theory.timeline import Costs, run, step_tasks

# Machado, Oliveira and Fernandes 2009 (IEEE TVCG 15:6), table 1, severity 1.0; linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                   [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])  # D65
DISTINCT = {kind: color for kind, color in COLORS.items() if kind not in HATCHES}


def linear(color: str) -> np.ndarray:
    """sRGB "#rrggbb" -> linear RGB (3,), 0 to 1."""
    rgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (lighter + 0.05) / (darker + 0.05) of relative luminances."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear RGB -> CIELAB."""
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def bars(ax) -> list[list[float]]:
    return numbers_of(ax.figure)[0]["bars"]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_gid() != LEGEND]


def test_contrast_is_measured_as_wcag_does():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("kind", COLORS)
def test_every_colour_stands_out_from_the_background(kind):
    assert contrast(COLORS[kind], "#ffffff") >= 3, "WCAG AA for graphical objects"


@pytest.mark.parametrize("vision", VISION)
def test_colours_differ_for_every_common_vision(vision):
    seen = {kind: lab(VISION[vision] @ linear(color)) for kind, color in DISTINCT.items()}
    nearest = min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(seen, 2))
    assert nearest >= 20, "ten times a difference that is just seen (CIE76: 2.3)"


def test_one_colour_twice_is_told_apart_by_its_hatch():
    pairs = [(style("gathered"), style("parameters")),
             (style("gradients", "all_reduce"), style("gradients", "reduce_scatter")),
             (style("compute", "backward"), style("compute"))]  # fmt: skip
    for one, other in pairs:
        assert one["facecolor"] == other["facecolor"] and one["hatch"] != other["hatch"]


def test_text_is_no_smaller_than_eight_points():
    assert SLANTED["fontsize"] >= 8


def test_a_total_beside_the_kinds_makes_no_bar_and_no_empty_half():
    row = {"parameters": 2, "gradients": 2}
    axes = [held_bars(new_axes(), {"rank 0": row | more}) for more in ({}, {"total": 4})]
    assert axes[0].get_xlim() == axes[1].get_xlim()


def test_held_bars_stack_to_what_is_held():
    ax = held_bars(new_axes(), {"rank 0": {"gradients": 2, "parameters": 2}, "rank 1": {}}, "B", 3)
    assert bars(ax) == [[0, -0.4, 2, 0.8], [2, -0.4, 2, 0.8]]
    assert texts(ax) == [" 4", " 0", " capacity 3"]
    assert ax.get_xlabel() == "B"


def test_bytes_against_ranks_are_lines_with_marks_of_their_own():
    ax = held_against_ranks(
        new_axes(), {"stage 0": ([1, 2], [16, 16]), "stage 3": ([1, 2], [16, 8])}
    )
    assert numbers_of(ax.figure)[0]["lines"] == [[[1, 2], [16, 16]], [[1, 2], [16, 8]]]
    assert len({(line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 2


def test_memory_over_a_step_names_its_peak():
    moments = [("start", {"parameters": 4}), ("gather", {"parameters": 4, "gathered": 16})]
    ax = memory_over_step(new_axes(), moments)
    assert [bar[1::2] for bar in bars(ax)] == [[0, 4], [0, 4], [4, 16]]
    assert texts(ax) == ["peak 20"]


def test_the_map_shows_what_is_held_and_frames_what_is_sent():
    ranks = [
        {"parameters": [(0, 4)], "gathered": [], "gradients": [(0, 2)]},
        {"parameters": [(0, 4)], "gathered": [(0, 4)], "optimizer_states": [(2, 4)]},
    ]
    ax = shard_map(new_axes(), [("w", 0, 3), ("", 3, 4)], ranks, {"gradients": [[(2, 4)], []]})
    rows = numbers_of(ax.figure)[0]["spans"]
    colored = [
        tuple(map(tuple, row.get_facecolor()[:, :3])) for row in ax.collections[:-1]
    ]  # the last are the edges of parameters
    solid = [bar for row, color in zip(rows, colored, strict=True)
             for bar in row if color and color != ((1, 1, 1),)]  # fmt: skip
    assert [(start, width) for start, _, width, _ in solid] == [
        (0, 4),
        (0, 2),
        (0, 4),
        (0, 4),
        (2, 2),
    ]
    frames = [bar for row, color in zip(rows, colored, strict=True) if not color for bar in row]
    assert [(start, width) for start, _, width, _ in frames] == [(2, 2)]
    assert texts(ax) == ["w", "pad"]


def test_a_schedule_says_what_each_rank_sends():
    ax = collective_schedule(new_axes(), 2, [("forward", "", 0), ("gather", "all_gather", 12)])
    assert texts(ax) == ["12", "12"]
    tall = [bar for bar in bars(ax) if bar[3] == 2]
    assert [bar[0] for bar in tall] == [0.55], "the collective spans both ranks"


def test_traffic_stacks_by_collective():
    ax = traffic_bars(new_axes(), {"stage 3": {"reduce_scatter": 2, "all_gather": 4, "total": 6}})
    assert [(start, width) for start, _, width, _ in bars(ax)] == [(0, 2), (2, 4)]
    assert texts(ax) == [" 6"]


@pytest.mark.parametrize(
    ("total", "unit", "factor"), [(3, "s", 1), (3e-2, "ms", 1e3), (3e-5, "µs", 1e6)]
)
def test_a_timeline_has_every_task_and_a_fitting_unit(total, unit, factor):
    costs = Costs(forward=total / 3, backward=total / 3, gather=total / 6, reduce=total / 3)
    line = run(step_tasks(costs, 2), overlap=False)
    ax = timeline(new_axes(), line)
    tasks = [p for p in line.placed if p.end_s > p.start_s]
    drawn = [bar for row in numbers_of(ax.figure)[0]["spans"] for bar in row]
    assert len(drawn) == len(tasks) == 10
    assert sum(bar[2] for bar in drawn) == pytest.approx(factor * line.total_s, rel=1e-4)
    assert ax.get_xlabel() == unit
    assert texts(ax) == [f" {factor * line.total_s:.4g} {unit}"]


def test_the_hierarchy_shows_shares_and_says_what_does_not_fit():
    tiers = [
        ("gpu", {"parameters": 20e9, "temporary": 20e9}, 80e9),
        ("cpu", {"gradients": 4e12}, 2e12),
    ]
    ax = offload_hierarchy(new_axes(), tiers, ["15 GB/s"])
    assert [bar[2] for bar in bars(ax)] == [25, 25, 200]
    assert texts(ax) == [" 40.0 of 80 GB, 50 %", " 4,000.0 of 2,000 GB, 200 %", "↕ 15 GB/s"]


def test_a_figure_is_shown_with_its_numbers_and_its_words(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "zerolab.course.plots.base.display", lambda what, raw=False: shown.append(what)
    )
    show(held_bars(new_axes(), {"rank 0": {"parameters": 2}}).figure, "Two bytes.")
    picture, words = shown
    assert picture["image/png"].startswith(b"\x89PNG")
    assert picture["text/plain"] == "Two bytes."
    assert picture[FIGURE_DATA] == [{"bars": [[0, -0.4, 2, 0.8]], "lines": []}]
    assert words.data == "*Two bytes.*"


def pixels_of(figure) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba()).astype(int)


def written(figure, shift=0):
    """A figure of 300 x 200 pixels with texts of all kinds that stand on whole pixels."""
    texts = [("gradients", {}), ("gradients", {"fontsize": 8}), ("gradients", {"color": "#c96607"}),
             ("8.4 ↕", {"rotation": 90}), ("rank 0", {"rotation": 40}), ("faint", {"alpha": 0.4}),
             ("glass", {"color": (0, 0, 1, 0.5)}), ("$x^2$", {}), ("gradients", {})]  # fmt: skip
    for number, (text, how) in enumerate(texts):
        x, y = 40 + 90 * (number % 3) + shift, 40 + 60 * (number // 3) + shift
        figure.text(x / 300, y / 200, text, rotation_mode="anchor", **how)
    return figure


@pytest.mark.parametrize("shift", [0, 7])
def test_text_that_is_kept_is_matplotlibs_own(shift):
    quick, own = (figure_of(3, 2, [])[0] for _ in range(2))
    FigureCanvasAgg(own)
    pixels_of(written(quick))  # all are kept from here on
    for text in [*quick.texts]:
        text.remove()
    expected = pixels_of(written(own, shift))
    assert (expected < 128).any()
    assert np.abs(pixels_of(written(quick, shift)) - expected).max() <= 3, "rounding, of 255"


def test_text_that_moves_between_pixels_keeps_its_look():
    figure, _ = figure_of(3, 2, [])
    text = figure.text(0.5, 0.5, "gradients")
    before = pixels_of(figure)
    text.set_x(0.5 + 0.3 / 300)
    assert (pixels_of(figure) == before).all()
    text.set_x(0.5 + 1 / 300)
    assert (pixels_of(figure)[:, 1:] == before[:, :-1]).all()


def test_text_ends_where_it_is_clipped_there_alone_and_may_be_blank():
    figure, (ax,) = figure_of(3, 2, [(0.5, 0, 0.5, 1)])
    ax.set_axis_off()
    ax.text(-0.1, 0.5, "gradients", clip_on=True)
    ax.text(0.2, 0.2, "  ")
    clipped = pixels_of(figure)
    assert (clipped[:, :150] == 255).all() and (clipped[:, 150:] < 128).any()
    ax.texts[0].set_clip_on(False)
    assert (pixels_of(figure)[:, :150] < 128).any(), "what is kept is the whole text"


def test_texts_are_kept_up_to_a_number(monkeypatch):
    monkeypatch.setattr("zerolab.course.plots.quick.TEXTS", 3)
    figure, _ = figure_of(3, 2, [])
    for number in range(9):
        figure.text(0.5, number / 10, str(number))
    first = pixels_of(figure)
    assert len(figure.canvas.get_renderer()._kept) == 3
    assert (pixels_of(figure) == first).all()
