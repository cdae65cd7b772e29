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
import math
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from zerolab.course.kept import patience
from zerolab.course.progress import record

NOT_ATTEMPTED, FAILED, PASSED = "not attempted", "not yet", "passed"
_MARK = {NOT_ATTEMPTED: "[ ]", FAILED: "[x]", PASSED: "[ok]"}


STUB = "your code here"
NOTHING = "Return it: print shows a value, and does not give it back."
LIMIT_S = 10.0  # for an answer that is tried in the notebook's own process
before_each: list[Callable[[], None]] = []  # what every check does first


def before_each_check(action: Callable[[], None]) -> Callable[[], None]:
    """Registers something that every check does first."""
    before_each.append(action)
    return action


class Wrong(Exception):
    """An answer that is wrong: what is different, what that suggests, and the points it earns.

    `difference` states the first thing that differs, with both values; `misconception` what one
    who gets this has usually done.
    """

    def __init__(self, difference: str, misconception: str = "", points: float = 0) -> None:
        super().__init__(difference)
        self.difference, self.misconception, self.points = difference, misconception, points


class Aborted(BaseException):
    """Judging cannot go on, whatever the answer is: passes through every judge."""


class Elsewhere:
    """A learner's function that lives in another process: a call asks there, and waits.

    Where grades are made, a judge is handed these in place of the functions.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def without(self, names: Sequence[str]) -> Elsewhere:
        """The same where functions of the package's own are withheld from it, see `withheld`."""
        raise NotImplementedError

    def run_on_ranks(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        ranks: list[int] | None,
        size: int,
        ready: Callable[[], None] | None,
    ) -> list[Any]:
        """The results by rank of `function(*args)`, on ranks there; raises as `World.run`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exercise:
    """One exercise: its number ("05.2"), title, full points, judge and hints, the mildest first.

    `choices` are the values that each of its numbers may take, those of the text first; a judge
    of an exercise that has any takes them as a second argument.
    """

    number: str
    title: str
    points: int
    judge: Callable[..., None]
    hints: tuple[str, ...]
    choices: Mapping[str, Sequence[float]] = field(default_factory=dict)


EXERCISES: dict[str, Exercise] = {}


def exercise(
    number: str, title: str, points: int, hints: list[str], **choices: Sequence[float]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers the decorated judge: it returns when the answer is right and raises when not.

    `choices` make it an exercise with personal numbers, see `given`.
    """

    def register(judge: Callable[..., None]) -> Callable[..., None]:
        EXERCISES[number] = Exercise(number, title, points, judge, tuple(hints), choices)
        return judge

    return register


class Given(SimpleNamespace):
    """The numbers of an exercise, each an attribute; shown as Python reads them, 13e9 or 104.3."""

    def __repr__(self) -> str:
        return ", ".join(f"{name} = {_thousands(value)}" for name, value in vars(self).items())


def _thousands(value: float) -> str:
    power = 3 * int(math.log10(value) // 3) if value >= 1e6 else 0
    return f"{value / 10**power:.10g}" + (f"e{power}" if power else "")


def given(number: str, learner: str = "") -> Given:
    """The numbers of an exercise: those of the text, or, with a learner's id, their own.

    The same id gets the same numbers everywhere. Where grades are made, the environment variable
    ZEROLAB_LEARNER says who the learner is, whatever the notebook says. ValueError for an exercise
    that does not exist or has no numbers of its own.
    """
    choices = find(number).choices
    if not choices:
        raise ValueError(f"Exercise {number} has the same numbers for everybody.")
    learner = os.environ.get("ZEROLAB_LEARNER") or str(learner).strip()
    if not learner:
        return Given(**{name: values[0] for name, values in choices.items()})
    draw = random.Random(f"{number} {learner}")
    return Given(**{name: draw.choice(values) for name, values in choices.items()})


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


def given_back(answer: Any) -> Any:
    """An answer that is a value, or what it returns; Wrong where that is nothing."""
    value = answer() if callable(answer) else answer
    if value is None and callable(answer):
        raise Wrong(f"Your function returned {type_of(value)}.", NOTHING)
    return value


def cut(text: str, most: int = 700) -> str:
    """A text for a verdict, cut where it is too long to be read."""
    return text if len(text) <= most else f"{text[:most]} … (cut)"


def shown(value: Any) -> str:
    """A value for a sentence; its type, where it cannot be shown."""
    try:
        return cut(repr(value), 200)
    except Exception:
        return type_of(value)


def find(number: str) -> Exercise:
    """The exercise of that number; ValueError, naming the nearest ones, where there is none."""
    if isinstance(number, str) and number in EXERCISES:
        return EXERCISES[number]
    near = difflib.get_close_matches(str(number), EXERCISES, n=3, cutoff=0.3) or list(EXERCISES)
    raise ValueError(f"There is no exercise {number!r}; did you mean {', '.join(near)}?")


def hint(number: str) -> Hints:
    """The hints of an exercise, the mildest first."""
    return Hints(find(number))


def check(number: str, answer: Any, learner: str = "") -> Verdict:
    """Judges an answer to an exercise: the points, with words. Never raises for an answer.

    `learner` is the id whose numbers the answer is for, see `given`. Raises ValueError for an
    exercise that does not exist. An attempt is noted in the learner's progress.
    """
    verdict = judged(number, answer, learner)
    if verdict.status != NOT_ATTEMPTED:
        record(number, float(verdict))
    return verdict


def judged(number: str, answer: Any, learner: str = "") -> Verdict:
    """What `check` says, without a note in anybody's progress."""
    task = find(number)
    return _judged(task, answer, *([given(number, learner)] if task.choices else []))


def _judged(task: Exercise, answer: Any, *numbers: Given) -> Verdict:
    if answer is None or answer is ...:
        return _verdict(task, 0, NOT_ATTEMPTED, "Replace the stub by your answer, then run again.")
    for action in before_each:
        action()
    try:
        with _limited(), _same_torch():
            task.judge(answer, *numbers)
    except NotImplementedError as error:
        if str(error) in (STUB, ""):
            words = "Replace the stub by your code, then run again."
            return _verdict(task, 0, NOT_ATTEMPTED, words)
        return _verdict(task, 0, FAILED, _stopped(error, answer))
    except Wrong as wrong:
        words = f"{wrong.difference}\n{wrong.misconception}".strip()
        return _verdict(task, wrong.points, FAILED, words)
    except (KeyboardInterrupt, Aborted):  # the first is the learner's own, to end it
        raise
    except BaseException as error:
        return _verdict(task, 0, FAILED, _stopped(error, answer))
    return _verdict(task, task.points, PASSED, "")


def _verdict(task: Exercise, points: float, status: str, words: str) -> Verdict:
    head = f"{task.number} {task.title}: {status}, {points:g} of {task.points} points"
    words = "\n".join(cut(line) for line in words.split("\n"))
    return Verdict(points, status, f"{head}\n{words}".strip())


def _same_torch() -> contextlib.AbstractContextManager[Any]:
    """Gradients are on inside, and afterwards as before, whatever an answer leaves behind."""
    torch = sys.modules.get("torch")  # a lesson of formulas may do without it
    return torch.enable_grad() if torch else contextlib.nullcontext()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError after LIMIT_S, where the system can interrupt a loop."""
    here = threading.current_thread() is threading.main_thread()
    if not here or not hasattr(signal, "setitimer"):
        yield
        return

    limit_s = LIMIT_S * patience()

    def stop(*_: object) -> None:
        raise TimeoutError(f"it did not end within {limit_s:.0f} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """Inside a check: what happens here does not count towards the answer's LIMIT_S."""
    here = threading.current_thread() is threading.main_thread()
    timer = here and hasattr(signal, "setitimer")
    left_s = signal.setitimer(signal.ITIMER_REAL, 0)[0] if timer else 0.0
    try:
        yield
    finally:
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, left_s)


def _stopped(error: BaseException, answer: Any) -> str:
    """The error in one line, with the last line of the learner's own file that led to it."""
    what = f"{type(error).__name__}: {error}"
    if not callable(answer):
        return f"This answer cannot be read: {what}"
    if line := getattr(error, "learners_line", ""):
        return f"Your code stopped: {what}, in {line}"
    own_file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == own_file:
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"Your code stopped: {what}, in line {frame.lineno} of your cell: {source}"
    return f"Your code could not be tried: {what}"
