"""The cell magic %%ranks: the cell runs on the ranks of the notebook's latest world."""

from __future__ import annotations

import ast
import linecache
import re
from typing import Any

from zerolab.practice.launcher.report import said
from zerolab.practice.world import latest_world


def _ranks_magic(line: str, cell: str) -> None:
    """Run the cell among each rank's variables, or those of the ranks in the line: %%ranks 0 2"""
    from IPython import get_ipython

    world = latest_world()
    if world is None:
        raise said(RuntimeError, "there is no world yet: make one first, as in world = World(4)")
    words = re.sub(r"[\[\](),]", " ", line).split()
    if not all(word.isdecimal() and int(word) < world.size for word in words):
        numbers = f"numbers from 0 to {world.size - 1}"
        raise said(ValueError, f"%%ranks takes {numbers}, as in %%ranks 0, not {line.strip()!r}")
    source = "\n" + cell  # the magic's own line counts
    number = len(get_ipython().user_ns["In"]) - 1
    name = f"<Cell In[{number}]>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    ast.parse(source, name)  # a slip of syntax shows without asking the ranks
    world.run_cell(source, name, sorted({int(word) for word in words}) or None)


def load_ipython_extension(ipython: Any) -> None:
    """Register the cell magic %%ranks."""
    ipython.register_magic_function(_ranks_magic, "cell", "ranks")
