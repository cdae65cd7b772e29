"""Tries a function on hidden cases, and recognises the usual wrong ones by what they do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from zerolab.course.checks.core import NOTHING, Elsewhere, Wrong, shown, type_of
from zerolab.course.withheld import withheld

ARITHMETIC = tuple(f"zerolab.practice.sharding:{name}"
                   for name in ("shard_range", "shard_numel", "padded_numel"))  # fmt: skip
"""Who owns which element, as the package reckons it."""

FORMULAS = ("zerolab.theory.memory:held", "zerolab.theory.memory:held_bytes",
            "zerolab.theory.plan:plan")  # fmt: skip
"""What a rank holds, as the package derives it."""

Misstep = tuple[Callable[..., Any], str]
"""A wrong version of the function, and the misconception that leads to it."""


def plain(value: Any) -> Any:
    """The value in Python's own types, so that no method of an answer's takes part in comparing.

    What has an index becomes an int, what has a float a float; what has neither equals nothing.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if issubclass(kind, str):
        return str.__str__(value)
    for base in (list, tuple, set, frozenset):
        if issubclass(kind, base):
            return base(map(plain, base.__iter__(value)))
    if issubclass(kind, dict):
        return {plain(k): plain(v) for k, v in dict.items(value)}
    try:
        return operator.index(value) if hasattr(kind, "__index__") else float(value)
    except (TypeError, ValueError, OverflowError):
        return object()


def same_plain(got: Any, wanted: Any) -> bool:
    return bool(plain(got) == plain(wanted))


def expect_function(
    answer: Any,
    right: Callable[..., Any],
    cases: Sequence[tuple[Any, ...]],
    missteps: Sequence[Misstep],
    describe: Callable[..., str],
    otherwise: str,
    same: Callable[[Any, Any], bool] = same_plain,
) -> None:
    """Raises Wrong unless `answer(*case)` is the right value in every case.

    The first difference is shown. A misstep is recognised where it agrees with the answer in all
    cases; an exception of the answer passes through, unless a difference comes before it.
    """
    expect_callable(answer)
    got = [_outcome(answer, case) for case in cases]
    if all(one is None for one in got) and all(right(*case) is not None for case in cases):
        raise Wrong("Your function returned nothing (None).", NOTHING)
    for case, one in zip(cases, got, strict=True):
        if isinstance(one, Exception):
            raise one
        if not same(one, wanted := right(*case)):
            words = next(
                (words for wrong, words in missteps if _agree(wrong, cases, got, same)), otherwise
            )
            raise Wrong(f"For {describe(*case)} it is {wanted}; you return {shown(one)}.", words)


def expect_callable(answer: Any) -> None:
    """Raises Wrong for an answer that is no function, before it is tried anywhere."""
    if not callable(answer):
        raise Wrong(f"This is {type_of(answer)}.", "Give the function itself.")


def without(answer: Any, *names: str) -> Any:
    """The answer, in whose calls functions of the package's own are withheld, "module:function"."""
    if isinstance(answer, Elsewhere):
        return answer.without(names)

    def alone(*args: Any) -> Any:
        with withheld(names):
            return answer(*args)

    return alone if callable(answer) else answer


def _agree(
    wrong: Callable[..., Any], cases: Sequence[tuple[Any, ...]], got: Sequence[Any],
    same: Callable[[Any, Any], bool],
) -> bool:  # fmt: skip
    pairs = zip((_outcome(wrong, case) for case in cases), got, strict=True)
    return all(
        type(a) is type(b) if isinstance(a, Exception) or isinstance(b, Exception) else same(b, a)
        for a, b in pairs
    )


def _outcome(function: Callable[..., Any], case: tuple[Any, ...]) -> Any:
    try:
        return function(*case)
    except NotImplementedError:
        raise
    except TimeoutError:  # the check's own limit
        raise
    except Exception as error:
        return error
