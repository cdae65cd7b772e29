"""Explorers: views over plain functions that a learner moves by mouse or keyboard.

`memory_explorer().show()` in a cell gives the controls where a kernel answers, and the still
figure with its numbers where none does.
"""

# ruff: noqa: F401 -- this file only lists the public names

import gc as _gc

from zerolab.course.widgets.base import Explorer, View
from zerolab.course.widgets.memory import memory_explorer, memory_view
from zerolab.course.widgets.offload import offload_planner, offload_view
from zerolab.course.widgets.overlap import overlap_explorer, overlap_view
from zerolab.course.widgets.shards import shard_map_explorer, shard_view

# A collection of all that the imports have made takes as long as two pictures, and comes in the
# midst of a move: what is there by now stays, and is looked at no more.
_gc.collect()
_gc.freeze()
