"""Worlds that checks keep: one of each size, whose ranks start anew before they meet new code."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

from zerolab.practice.world import World, start_server

TIMEOUT_S = 4.0  # for what a check runs on ranks
START_S = 120.0  # for new ranks to come up, on a busy machine: not the answer's time
CROWDED = 8.0  # beyond that nobody wants to wait for the verdict
MOST = 60.0  # and whatever PATIENCE says
PATIENCE = "ZEROLAB_PATIENCE"  # in the environment
_kept: dict[int, World] = {}
_used: set[int] = set()


def patience() -> float:
    """How many times as long an answer may take on this machine just now as on a quiet one."""
    load = 1.0
    with contextlib.suppress(AttributeError, OSError):  # Windows, and systems that do not say
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return given_patience() * min(CROWDED, max(1.0, load))


def given_patience() -> float:
    """What PATIENCE says, from 1 to MOST: how many times as long, where nobody waits."""
    given = os.environ.get(PATIENCE, "1")
    try:
        return min(MOST, max(1.0, float(given)))
    except ValueError:
        warnings.warn(f"{PATIENCE} is not a number: {given!r}. It is taken as 1.", stacklevel=2)
        return 1.0


def renew() -> None:
    """Whatever the last code did to the ranks, the next one does not meet it."""
    while _used:
        size = _used.pop()
        try:
            _kept[size].restart()
        except RuntimeError:
            del _kept[size]


def _ready() -> None:
    """Runs on a rank, to say that the rank is there."""


def run(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    ranks: list[int] | None,
    ready: Callable[[], None] | None,
    starting: Callable[[], contextlib.AbstractContextManager[None]],
) -> list[Any]:
    """The results by rank of `function(*args)`. RankError, RankTimeout as from `World.run`.

    `ready` runs first on ranks that are new, outside of the code's time: slow imports. `starting`
    is entered while ranks start.
    """
    with starting():
        if size not in _kept:
            start_server()
            _kept[size] = World(size, timeout=TIMEOUT_S)
            _kept[size].private = True
        if size not in _used:
            _kept[size].run(ready or _ready, timeout=START_S)
    _used.add(size)
    return _kept[size].run(function, *args, ranks=ranks, timeout=limit_s())


def limit_s() -> float:
    """Seconds that code may take on ranks, on this machine just now."""
    return TIMEOUT_S * patience()
