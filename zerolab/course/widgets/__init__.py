"""Explorers: views over plain functions that a learner moves by mouse or keyboard.

`memory_explorer().show()` in a cell gives the controls where a kernel answers, and the still
figure with its numbers where none does.
"""

# ruff: noqa: F401 -- this file only lists the public names

from zerolab.course.widgets.base import Explorer, View
from zerolab.course.widgets.memory import memory_explorer, memory_view
from zerolab.course.widgets.offload import offload_planner, offload_view
from zerolab.course.widgets.overlap import overlap_explorer, overlap_view
from zerolab.course.widgets.shards import shard_map_explorer, shard_view
