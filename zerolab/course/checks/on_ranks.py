"""Runs a learner's function on real ranks, under the meter, in a world that the checks keep."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from zerolab.course.checks.core import STUB, Wrong, before_each_check
from zerolab.practice.world import RankError, RankTimeout, World, start_server

RANKS = 4
TIMEOUT_S = 4.0
_kept: list[World] = []
_used: list[bool] = []


@before_each_check
def _renew() -> None:
    """Whatever the last answer did to the ranks, the next one does not meet it."""
    if not _used:
        return
    _used.clear()
    try:
        _kept[0].restart()
    except RuntimeError:
        _kept.clear()


def on_ranks(function: Callable[..., Any], *args: Any, ranks: list[int] | None = None) -> list[Any]:
    """The results by rank of `function(*args)` on four ranks, or on some of them.

    Raises Wrong where the learner's code raised or did not come back, with its own last line;
    NotImplementedError where it is still the stub.
    """
    if not _kept:
        start_server()
        _kept.append(World(RANKS, timeout=TIMEOUT_S))
        _kept[0].private = True
    if function.__module__.startswith("zerolab.course."):
        # By value: else each fresh rank would import all checks, and sympy with them.
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    _used.append(True)
    try:
        return _kept[0].run(function, *args, ranks=ranks)
    except RankTimeout as error:
        raise Wrong(
            f"The ranks did not come back within {TIMEOUT_S:g} seconds.",
            "Either the code is still at work, or one rank waits for a collective that another "
            f"never calls: all must call the same ones in the same order.\n{error}",
        ) from None
    except RankError as error:
        if f"NotImplementedError: {STUB}" in str(error):
            raise NotImplementedError(STUB) from None
        raise Wrong(f"Your code stopped on {error}{_own_line(error.where)}") from None


def _own_line(where: str) -> str:
    """The last line of the learner's own code in a rank's traceback, for the verdict."""
    found = re.findall(r"^  (.*?),? line (\d+).*\n    (.*)$", where, re.MULTILINE)
    own = [(line, source) for file, line, source in found if not _is_library(file)]
    return f", in line {own[-1][0]} of your cell: {own[-1][1].strip()}" if own else ""


def _is_library(file: str) -> bool:
    """Whether a traceback's file is this package's or an installed one."""
    package = str(Path(__file__).parents[2])
    return package in file or "site-packages" in file
