"""Reads sizes as people write them, and recognises the usual mistakes in them."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerolab.course.checks.core import Wrong, given_back, shown, type_of

UNITS = {
    "b": 1, "byte": 1, "bytes": 1,
    "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "gbyte": 1e9, "gbytes": 1e9, "gigabyte": 1e9, "gigabytes": 1e9,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


COARSE = "It is rounded too coarsely: three digits."
COUNTS = {"x": 1, "times": 1, "million": 1e6, "billion": 1e9, "trillion": 1e12}


@dataclass(frozen=True)
class Slip:
    """A wrong value that a known mistake leads to, and the sentence that names the mistake."""

    value: float
    misconception: str


def read_bytes(answer: Any, per_parameter: bool = False) -> float:
    """Bytes from a number (bytes) or a text such as "208 GB" or "193.7 GiB"; Wrong if neither.

    "7 bytes/parameter" is read where a size for each parameter is asked for, and Wrong elsewhere.
    """
    if isinstance(answer, bool) or not (isinstance(answer, str) or hasattr(answer, "__float__")):
        raise Wrong(
            f"This is {type_of(answer)}, where a size is expected.",
            'Write bytes as a number, 208e9, or with a unit, "208 GB".',
        )
    if not isinstance(answer, str):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(value := float(answer)):
                return value
        raise Wrong(f"{shown(answer)} is not a size.", "Put numbers in: bytes are one number.")
    text = re.sub(r"\s*(/\s*|(per|a|each) )(rank|gpu)$", "", answer.lower().strip())
    whole, text = text, re.sub(r"\s*(/\s*|(per|a|each) )parameter$", "", text)
    if text != whole and not per_parameter:
        why = "That is for one parameter: the question is about all of them."
        raise Wrong(f"{shown(answer)} is not it.", why)
    text = re.sub(r",(?=\d{1,2}(\D|$))", ".", text)  # a decimal comma, not thousands
    found = re.fullmatch(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?\d+)?)\s*([a-z]*)\s*", text)
    if not found or (found[2] or "bytes") not in UNITS:
        write = 'Write a number and a unit, such as "208 GB".'
        raise Wrong(f"{shown(answer)} is not a size.", write)
    return float(re.sub("[_,]", "", found[1])) * UNITS[found[2] or "bytes"]


def read_number(answer: Any) -> float:
    """A number without a unit; Wrong if it is none.

    From 1.5, Fraction(3, 2), "3/2", "1.5x", "7 billion" or "1,000,000".
    """
    text, times = str.strip(answer) if isinstance(answer, str) else "", 1.0
    if found := re.fullmatch(r"(.*\d)\s*([^\W\d_]+|%)", text):
        text, word = found[1], found[2].lower()
        if word not in COUNTS:
            raise Wrong(f"{shown(answer)}: give the number alone, without {found[2]!r}.")
        times = COUNTS[word]
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    with contextlib.suppress(TypeError, ValueError, ZeroDivisionError, OverflowError):
        value = float(Fraction(text) if "/" in text else text or answer)
        if math.isfinite(value) and not isinstance(answer, bool):
            return value * times
    raise Wrong(f"{shown(answer)} is not a number.", "Write it as 1.5, or 3 / 2.")


def expect_number(answer: Any, right: float, what: str, slips: list[Slip]) -> None:
    """Raises Wrong unless the answer, or what it returns, is `right` within half a percent."""
    value = read_number(given_back(answer))
    if math.isclose(value, right, rel_tol=0.005):
        return
    _recognise(value, slips, f"{what}: {value:g} is not it.")
    if two_digits(value, right):
        raise Wrong(f"{what}: {value:g} is near.", COARSE)
    why = "Write the formula down, with its units, before you put numbers in."
    raise Wrong(f"{what}: {value:g} is not it.", why)


def expect_bytes(
    answer: Any, right: float, what: str, slips: list[Slip], per_parameter: bool = False
) -> None:
    """Raises Wrong unless the answer, or what it returns, is `right` bytes within half a percent.

    `slips` name what a wrong value comes from; a value that is off by GiB for GB, by elements
    for bytes or by a factor of 1e9 is recognised for every question.
    """
    value = read_bytes(given_back(answer), per_parameter)
    if math.isclose(value, right, rel_tol=0.005):
        return
    general = [
        Slip(right * 1e9 / 2**30, "That is the number of GiB written as GB: 1 GB is 1e9 bytes."),
        Slip(right * 2**30 / 1e9, "You multiplied by 2^30: 1 GB is 1e9 bytes, 1 GiB is 2^30."),
        Slip(right / 1e9, 'That is the number of GB: give bytes, or write the unit, "… GB".'),
    ]
    _recognise(value, [*slips, *general], f"{what}: {_show(value)} is not it.")
    if math.isclose(value, right, rel_tol=0.02) or two_digits(value, right):
        raise Wrong(f"{what}: {_show(value)} is near.", COARSE)
    much = "too much" if value > right else "too little"
    raise Wrong(f"{what}: {_show(value)} is {much}.", "Write down each part of it, with its unit.")


def two_digits(value: float, right: float) -> bool:
    """Whether the value is the right one with two digits of it left, rounded up or down."""
    if right <= 0:
        return False
    step = 10 ** (math.floor(math.log10(right)) - 1)
    return abs(value - right) < step and math.isclose(value, round(value / step) * step)


def _recognise(value: float, slips: list[Slip], difference: str) -> None:
    """Raises Wrong, with its misconception, where the value comes from a known slip."""
    for slip in slips:
        if math.isclose(value, slip.value, rel_tol=0.005):
            raise Wrong(difference, slip.misconception)


def _show(value: float) -> str:
    if value < 1e6:
        return f"{value:,.6g} bytes"
    return f"{value / 1e6:,.4g} MB" if value < 1e9 else f"{value / 1e9:,.4g} GB"
