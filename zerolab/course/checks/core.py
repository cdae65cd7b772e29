"""How an exercise is judged: a check never raises, and says one thing that helps.

An exercise is a function that takes the learner's answer and returns points, or raises `Wrong`
with the first difference and the misconception that it points to. `check` turns everything that
can happen into a `Verdict`.
"""

from __future__ import annotations

import contextlib
import difflib
import html
import linecache
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerolab.course.progress import record

NOT_ATTEMPTED, FAILED, PASSED = "not attempted", "not yet", "passed"
_MARK = {NOT_ATTEMPTED: "[ ]", FAILED: "[x]", PASSED: "[ok]"}


STUB = "your code here"
LIMIT_S = 10.0  # for an answer that is tried in the notebook's own process
_before: list[Callable[[], None]] = []


def before_each_check(action: Callable[[], None]) -> Callable[[], None]:
    """Registers something that every check does first."""
    _before.append(action)
    return action


class Wrong(Exception):
    """An answer that is wrong: what is different, what that suggests, and the points it earns.

    `difference` states the first thing that differs, with both values; `misconception` what one
    who gets this has usually done.
    """

    def __init__(self, difference: str, misconception: str = "", points: float = 0) -> None:
        super().__init__(difference)
        self.difference, self.misconception, self.points = difference, misconception, points


@dataclass(frozen=True)
class Exercise:
    """One exercise: its number ("05.2"), title, full points, judge and hints, the mildest first."""

    number: str
    title: str
    points: int
    judge: Callable[[Any], None]
    hints: tuple[str, ...]


EXERCISES: dict[str, Exercise] = {}


def exercise(
    number: str, title: str, points: int, hints: list[str]
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Registers the decorated judge: it returns when the answer is right and raises when not."""

    def register(judge: Callable[[Any], None]) -> Callable[[Any], None]:
        EXERCISES[number] = Exercise(number, title, points, judge, tuple(hints))
        return judge

    return register


class Verdict(float):
    """The points of an answer, as a number; shown, it is the sentence that goes with them.

    `repr` is the number alone, which is what a grading tool reads out of the cell.
    """

    status: str
    text: str

    def __new__(cls, points: float, status: str, text: str) -> Verdict:
        self = super().__new__(cls, points)
        self.status, self.text = status, text
        return self

    def __repr__(self) -> str:
        return f"{float(self):g}"

    def __str__(self) -> str:
        return f"{_MARK[self.status]} {self.text}"

    def _repr_markdown_(self) -> str:
        head, _, rest = self.text.partition("\n")
        lines = "".join(f"\n\n{line}" for line in rest.split("\n") if line)
        return f"**{_MARK[self.status]} {head}**{lines}"


class Hints:
    """An exercise's hints, folded one inside the other: open as many as you need."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise

    def __repr__(self) -> str:
        hints = enumerate(self.exercise.hints, 1)
        return "\n".join(f"Hint {number}: {text}" for number, text in hints)

    def _repr_html_(self) -> str:
        folded = ""
        for place, text in reversed(list(enumerate(self.exercise.hints, 1))):
            folded = (
                f"<details><summary>Hint {place} for {self.exercise.number}</summary>"
                f"<p>{html.escape(text)}</p>{folded}</details>"
            )
        return folded


def type_of(value: Any) -> str:
    """What a learner's function gave back, for a sentence."""
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def find(number: str) -> Exercise:
    """The exercise of that number; ValueError, naming the nearest ones, where there is none."""
    if number in EXERCISES:
        return EXERCISES[number]
    near = difflib.get_close_matches(str(number), EXERCISES, n=3, cutoff=0.3) or list(EXERCISES)
    raise ValueError(f"There is no exercise {number!r}; did you mean {', '.join(near)}?")


def hint(number: str) -> Hints:
    """The hints of an exercise, the mildest first."""
    return Hints(find(number))


def check(number: str, answer: Any) -> Verdict:
    """Judges an answer to an exercise: the points, with words. Never raises for an answer.

    Raises ValueError for an exercise that does not exist. An attempt is noted in the learner's
    progress.
    """
    verdict = _judged(find(number), answer)
    if verdict.status != NOT_ATTEMPTED:
        record(number, float(verdict))
    return verdict


def _judged(task: Exercise, answer: Any) -> Verdict:
    if answer is None or answer is ...:
        return _verdict(task, 0, NOT_ATTEMPTED, "Replace the stub by your answer, then run again.")
    for action in _before:
        action()
    try:
        with _limited():
            task.judge(answer)
    except NotImplementedError as error:
        if str(error) in (STUB, ""):
            words = "Replace the stub by your code, then run again."
            return _verdict(task, 0, NOT_ATTEMPTED, words)
        return _verdict(task, 0, FAILED, _stopped(error, answer))
    except Wrong as wrong:
        words = f"{wrong.difference}\n{wrong.misconception}".strip()
        return _verdict(task, wrong.points, FAILED, words)
    except (Exception, SystemExit) as error:
        return _verdict(task, 0, FAILED, _stopped(error, answer))
    return _verdict(task, task.points, PASSED, "")


def _verdict(task: Exercise, points: float, status: str, words: str) -> Verdict:
    head = f"{task.number} {task.title}: {status}, {points:g} of {task.points} points"
    return Verdict(points, status, f"{head}\n{words}".strip())


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError after LIMIT_S, where the system can interrupt a loop."""
    here = threading.current_thread() is threading.main_thread()
    if not here or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it did not end within {LIMIT_S:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _stopped(error: BaseException, answer: Any) -> str:
    """The error in one line, with the last line of the learner's own file that led to it."""
    what = f"{type(error).__name__}: {error}"
    if not callable(answer):
        return f"This answer cannot be read: {what}"
    own_file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == own_file:
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"Your code stopped: {what}, in line {frame.lineno} of your cell: {source}"
    return f"Your code could not be tried: {what}"
