"""Several small questions in one exercise: a dict of answers, a point for each that is right."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolab.course.checks.core import STUB, Wrong, given_back, shown
from zerolab.course.checks.numbers import COARSE, read_number, two_digits


@dataclass(frozen=True)
class Question:
    """One question; `right` is a number, or a word with its other spellings.

    `slips` maps wrong answers to the misconceptions that lead to them.
    """

    key: str
    right: float | tuple[str, ...]
    slips: Mapping[float | str, str]
    otherwise: str  # for a wrong answer that no known slip explains

    def problem(self, answer: Any) -> str | None:
        """What is wrong with an answer, None where it is right."""
        no = f"{self.key}: {shown(answer)} is not it. "
        if isinstance(self.right, tuple):
            if not isinstance(answer, str):
                return f"{self.key}: answer with a word, such as {next(iter(self.slips))!r}."
            word = _word(answer)
            if word in map(_word, self.right):
                return None
            slips = {_word(str(slip)): words for slip, words in self.slips.items()}
            return no + slips.get(word, self.otherwise)
        try:
            value = read_number(answer)
        except Wrong as wrong:
            return f"{self.key}: {wrong.difference} {wrong.misconception}".strip()
        if math.isclose(value, self.right, rel_tol=0.002):
            return None
        for slip, words in self.slips.items():
            if isinstance(slip, str):
                continue
            if math.isclose(value, slip, rel_tol=0.002) or two_digits(value, slip):
                return no + words
        return no + (COARSE if two_digits(value, self.right) else self.otherwise)


def _word(text: str) -> str:
    """Without article, case, space, hyphen and plural: "The all-gathers" is allgather."""
    text = re.sub(r"[\W_]|^(the|an|a|its|their) ", "", str.__str__(text).lower().strip())
    return re.sub(r"(?<=ss)es$|(?<!s)s$", "", text)


def expect_answers(answer: Any, questions: Sequence[Question]) -> None:
    """Raises Wrong, with a line for each question that is not right, unless all are."""
    given = given_back(answer)
    if not isinstance(given, dict):
        raise Wrong(f"This is a {type(given).__name__}.", "Return the dict of your answers.")
    if not given:
        raise NotImplementedError(STUB)
    if strange := [key for key in given if key not in {q.key for q in questions}]:
        keys = ", ".join(q.key for q in questions)
        raise Wrong(f"There is no question {shown(strange[0])}.", f"The questions are {keys}.")
    lines = [
        q.problem(given[q.key]) if given.get(q.key) is not None else f"{q.key}: not answered yet."
        for q in questions
    ]
    if wrong := [line for line in lines if line]:
        right = len(questions) - len(wrong)
        raise Wrong(f"{right} of {len(questions)} are right.", "\n".join(wrong), points=right)
