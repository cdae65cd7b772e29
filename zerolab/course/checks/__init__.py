"""One check for each exercise: `check(id, answer)` says what is right or wrong and why."""

from zerolab.course.checks import (
    lesson01,
    lesson02,
    lesson03,
    lesson04,
    lesson05,
    lesson06,
    lesson07,
    lesson12,
)
from zerolab.course.checks.core import EXERCISES, Verdict, check, hint

__all__ = [
    "EXERCISES",
    "Verdict",
    "check",
    "hint",
    "lesson01",
    "lesson02",
    "lesson03",
    "lesson04",
    "lesson05",
    "lesson06",
    "lesson07",
    "lesson12",
]
