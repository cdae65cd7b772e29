"""Tries a function on hidden cases, and recognises the usual wrong ones by what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerolab.course.checks.core import Wrong, type_of

Misstep = tuple[Callable[..., Any], str]
"""A wrong version of the function, and the misconception that leads to it."""


def expect_function(
    answer: Any,
    right: Callable[..., Any],
    cases: Sequence[tuple[Any, ...]],
    missteps: Sequence[Misstep],
    describe: Callable[..., str],
    otherwise: str,
    same: Callable[[Any, Any], bool] = lambda got, wanted: got == wanted,
) -> None:
    """Raises Wrong unless `answer(*case)` is the right value in every case.

    The first difference is shown. A misstep is recognised where it agrees with the answer in all
    cases; an exception of the answer passes through, unless a difference comes before it.
    """
    expect_callable(answer)
    got = [_outcome(answer, case) for case in cases]
    for case, one in zip(cases, got, strict=True):
        if isinstance(one, Exception):
            raise one
        if not same(one, wanted := right(*case)):
            words = next(
                (words for wrong, words in missteps if _agree(wrong, cases, got, same)), otherwise
            )
            raise Wrong(f"For {describe(*case)} it is {wanted}; you return {one!r}.", words)


def expect_callable(answer: Any) -> None:
    """Raises Wrong for an answer that is no function, before it is tried anywhere."""
    if not callable(answer):
        raise Wrong(f"This is {type_of(answer)}.", "Give the function itself.")


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
