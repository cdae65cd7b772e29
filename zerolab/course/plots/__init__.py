"""Figures from numbers: plot functions take numbers and an `ax` and return it; `show` displays.

Nothing here computes what theory derives or ranks count. One colour for each kind of state in
every figure; what is drawn in one colour twice is told apart by its hatch, and every part carries
its name, so that nothing is said by colour alone.
"""

# ruff: noqa: F401 -- this file only lists the public names

from zerolab.course.plots.base import (
    COLORS,
    FIGURE_DATA,
    HATCHES,
    figure_of,
    new_axes,
    numbers_of,
    png_of,
    show,
)
from zerolab.course.plots.memory import held_against_ranks, held_bars, memory_over_step, shard_map
from zerolab.course.plots.moves import (
    collective_schedule,
    offload_hierarchy,
    timeline,
    timeline_legend,
    traffic_bars,
)
