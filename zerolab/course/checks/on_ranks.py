"""Runs a learner's function on real ranks, under the meter, in a world that the checks keep."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from zerolab.course.checks.core import STUB, Wrong, before_each_check, crowd, untimed
from zerolab.practice.world import RankError, RankTimeout, World, start_server

RANKS = 4
TIMEOUT_S = 4.0
START_S = 60.0  # for new ranks to come up, on a busy machine: not the answer's time
_kept: dict[int, World] = {}
_used: set[int] = set()


@before_each_check
def _renew() -> None:
    """Whatever the last answer did to the ranks, the next one does not meet it."""
    while _used:
        size = _used.pop()
        try:
            _kept[size].restart()
        except RuntimeError:
            del _kept[size]


def on_four_and_three(trial: Callable[[int], None]) -> None:
    """Judges on four ranks, and then on three: a 4 that is written out in an answer fails there."""
    trial(RANKS)
    try:
        trial(3)
    except Wrong as wrong:
        raise Wrong(
            f"All is right on four ranks. On three: {wrong.difference}",
            "Is a 4 written out somewhere? The number of ranks is comm.world_size.\n"
            f"{wrong.misconception}",
            points=wrong.points,
        ) from None


def _ready() -> None:
    """Runs on a rank, to say that the rank is there."""


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: list[int] | None = None,
    size: int = RANKS,
    ready: Callable[[], None] = _ready,
) -> list[Any]:
    """The results by rank of `function(*args)` in a world of that size, or on some of its ranks.

    `ready` runs first on ranks that are new, outside of the answer's time: slow imports.

    Raises Wrong where the learner's code raised or did not come back, with its own last line;
    NotImplementedError where it is still the stub.
    """
    for module in {function.__module__, __name__}:
        if module.startswith("zerolab.course."):
            # By value: else each fresh rank would import all checks, and sympy with them.
            cloudpickle.register_pickle_by_value(sys.modules[module])
    with untimed():
        if size not in _kept:
            start_server()
            _kept[size] = World(size, timeout=TIMEOUT_S)
            _kept[size].private = True
        if size not in _used:
            _kept[size].run(ready, timeout=START_S)
    _used.add(size)
    limit_s = TIMEOUT_S * crowd()
    try:
        return _kept[size].run(function, *args, ranks=ranks, timeout=limit_s)
    except RankTimeout as error:
        raise Wrong(
            f"The ranks did not come back within {limit_s:.0f} seconds.",
            "Either the code is still at work, or one rank waits for a collective that another "
            f"never calls: all must call the same ones in the same order.\n{error}",
        ) from None
    except RankError as error:
        if f"NotImplementedError: {STUB}" in str(error):
            raise NotImplementedError(STUB) from None
        said = str(error)
        if re.match(r"rank \d+: ", said):
            raise Wrong(f"Your code stopped on {said}{_own_line(error.where)}") from None
        raise Wrong(f"{said[:1].upper()}{said[1:]}{_own_line(error.where)}") from None


def _own_line(where: str) -> str:
    """The last line of the learner's own code in a rank's traceback, for the verdict."""
    found = re.findall(r"^  (.*?),? line (\d+).*\n    (.*)$", where, re.MULTILINE)
    own = [(line, source) for file, line, source in found if not _is_library(file)]
    return f", in line {own[-1][0]} of your cell: {own[-1][1].strip()}" if own else ""


def _is_library(file: str) -> bool:
    """Whether a traceback's file is this package's or an installed one."""
    package = str(Path(__file__).parents[2])
    return package in file or "site-packages" in file
