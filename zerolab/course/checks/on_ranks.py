"""Runs a learner's function on real ranks, under the meter, in a world that the checks keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerolab.course.checks.core import Wrong
from zerolab.practice.world import RankError, RankTimeout, World, start_server

RANKS = 4
TIMEOUT_S = 4.0
_kept: list[World] = []


def on_ranks(function: Callable[..., Any], *args: Any, ranks: list[int] | None = None) -> list[Any]:
    """The results by rank of `function(*args)` on four ranks, or on some of them.

    Raises Wrong where the learner's code raised or did not come back, with its own last line;
    NotImplementedError where it is still the stub.
    """
    if not _kept:
        start_server()
        _kept.append(World(RANKS, timeout=TIMEOUT_S))
    try:
        return _kept[0].run(function, *args, ranks=ranks)
    except RankTimeout as error:
        raise Wrong(
            f"The ranks did not come back within {TIMEOUT_S:g} seconds.",
            "All ranks must call the same collectives in the same order; one waits for a call "
            f"that another never makes.\n{error}",
        ) from None
    except RankError as error:
        if "NotImplementedError" in str(error):
            raise NotImplementedError from None
        raise Wrong(f"Your code stopped on {error}") from None
