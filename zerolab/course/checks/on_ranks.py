"""Runs a learner's function on real ranks, under the meter, in a world that the checks keep."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from zerolab.course import kept
from zerolab.course.checks.core import STUB, Elsewhere, Wrong, before_each_check, untimed
from zerolab.practice.world import RankError, RankTimeout

RANKS = 4
before_each_check(kept.renew)


def on_four_and_three(trial: Callable[[int], None]) -> None:
    """Judges on four ranks, and then on three: a 4 that is written out in an answer fails there."""
    trial(RANKS)
    try:
        trial(3)
    except Wrong as wrong:
        why = "Is a 4 written out somewhere? The number of ranks is comm.world_size."
        if "right up to rounding" in wrong.misconception:
            why = "A division by 4 is exact in binary, and one by 3 is rounded."
        raise Wrong(
            f"All is right on four ranks. On three: {wrong.difference}",
            f"{why}\n{wrong.misconception}",
            points=wrong.points,
        ) from None


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: list[int] | None = None,
    size: int = RANKS,
    ready: Callable[[], None] | None = None,
) -> list[Any]:
    """The results by rank of `function(*args)` in a world of that size, or on some of its ranks.

    `ready` runs first on ranks that are new, outside of the answer's time: slow imports. Where
    grades are made, what is tried together with a learner's function runs on ranks where that
    function lives, and the rest on ranks that never met it.

    Raises Wrong where the learner's code raised or did not come back, with its own last line;
    NotImplementedError where it is still the stub.
    """
    send_checks_by_value()
    limit_s = kept.limit_s()
    try:
        if (far := next(_elsewhere(args), None)) is not None:
            with untimed():
                return far.run_on_ranks(function, args, ranks, size, ready)
        return kept.run(size, function, *args, ranks=ranks, ready=ready, starting=untimed)
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


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` on a rank that never meets a learner's function: there keys are made.

    It has one thread, as all ranks have, and is another process than the notebook's, too. Its time
    is not the answer's.
    """
    with untimed():
        return on_ranks(function, *args, size=1)[0]


def beside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in the process of the learner's function, where its memory can be counted.

    That is this process; where grades are made, a rank of its own. Raises as `on_ranks` does.
    """
    if any(_elsewhere(args)):
        return on_ranks(function, *args, size=1)[0]
    return function(*args)


def send_checks_by_value() -> None:
    """Else each fresh rank would import all checks, and sympy with them; a sandbox has none."""
    for name, module in list(sys.modules.items()):
        if name.startswith("zerolab.course.checks"):
            cloudpickle.register_pickle_by_value(module)


def _elsewhere(values: Iterable[Any]) -> Iterator[Elsewhere]:
    for value in values:
        if isinstance(value, Elsewhere):
            yield value
        elif isinstance(value, list | tuple):
            yield from _elsewhere(value)


def _own_line(where: str) -> str:
    """The last line of the learner's own code in a rank's traceback, for the verdict."""
    found = re.findall(r"^  (.*?),? line (\d+).*\n    (.*)$", where, re.MULTILINE)
    own = [(line, source) for file, line, source in found if not _is_library(file)]
    return f", in line {own[-1][0]} of your cell: {own[-1][1].strip()}" if own else ""


def _is_library(file: str) -> bool:
    """Whether a traceback's file is this package's or an installed one."""
    package = str(Path(__file__).parents[2])
    return package in file or "site-packages" in file
