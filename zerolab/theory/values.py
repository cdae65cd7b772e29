"""Input manners, once: whole numbers and known names, or one sentence saying what is possible."""

from collections.abc import Iterable
from difflib import get_close_matches
from math import inf
from typing import TypeVar

T = TypeVar("T")
MOST = 10**18  # of anything: products of larger numbers are no floats any more


def whole(name: str, value: float, least: int = 0) -> int:
    """`value` as an exact int of at least `least`; 7.5e9 is welcome, 0.5, True and "8" are not."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and MOST < value < inf:
        raise ValueError(f"{name} must be at most 1e18.")
    if not number or not least <= value < inf or int(value) != value:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return int(value)


def one_of(name: str, value: T, known: Iterable[T]) -> T:
    """`value` when it is among `known`; otherwise ValueError with the nearest names."""
    names = list(known)
    if value in names and not isinstance(value, bool):
        return value
    text = [str(n) for n in names]
    near = get_close_matches(str(value), text, n=3, cutoff=0.4)
    hint = f"the nearest are {', '.join(near)}" if near else f"possible are {', '.join(text)}"
    raise ValueError(f"{name} {value!r} is not known; {hint}.")
