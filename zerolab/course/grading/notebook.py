"""Grades one submitted notebook: runs what the plan says, and starts anew after what ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerolab.course.checks import EXERCISES
from zerolab.course.checks.core import FAILED, Verdict
from zerolab.course.grading.judging import Clock, Failed, Gone, Notebook
from zerolab.course.grading.sandbox import Limits
from zerolab.course.grading.submission import (
    Judge,
    Lesson,
    Plan,
    Run,
    Unreadable,
    plain,
    plan,
    read,
)

MOST_STARTS = 8  # of one notebook: each cell that ends it is left out of the next start
Noted = Callable[["Result"], None]


@dataclass(frozen=True)
class Result:
    """Points for one exercise, and why."""

    id: str
    points: float
    max_points: int
    reason: str


@dataclass
class Graded:
    """One notebook's grade; `error` where it could not be graded as a whole."""

    student: str
    notebook: str
    points: float = 0.0
    max_points: int = 0
    exercises: list[Result] = field(default_factory=list)
    error: str = ""
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def result(exercise: str, points: float, reason: str) -> Result:
    """With the words made fit for tables."""
    return Result(exercise, points, EXERCISES[exercise].points, plain(reason))


def grade_notebook(
    lesson: Lesson,
    path: Path,
    student: str,
    limits: Limits,
    done: dict[str, Result] | None = None,
    noted: Noted = lambda _: None,
    clock: Clock | None = None,
) -> Graded:
    """Grades the file as that student's. Never raises for what is in it.

    `done` are results that stand already; `noted` hears of each new one at once. `clock` has the
    seconds that are left, if it is not the first try.
    """
    results, clock = dict(done or {}), clock or Clock()
    graded = Graded(student, lesson.name)
    try:
        todo = plan(lesson, read(path))
    except Unreadable as error:
        return nothing(lesson, student, plain(f"{path.name}: {error}"))

    def settle(one: Result) -> None:
        results[one.id] = one
        noted(one)

    for exercise, why in todo.missing.items():
        settle(result(exercise, 0, why))
    ended: dict[str, str] = {}  # cells that ended the sandbox, and how
    for _ in range(MOST_STARTS):
        if clock.left_s <= 0 or all(exercise in results for exercise in lesson.exercises):
            break
        _attempt(todo, student, limits, clock, results, ended, settle)
    last = next(reversed(ended.values()), "")
    for exercise in lesson.exercises:
        if exercise not in results:
            words = f"not judged: the notebook ended the program {MOST_STARTS} times, last: {last}"
            if clock.left_s <= 0:
                words = "not judged: what comes before it used up the notebook's time"
            settle(result(exercise, 0, words))
    graded.exercises = [results[exercise] for exercise in lesson.exercises]
    graded.points = sum(one.points for one in graded.exercises)
    graded.max_points = sum(one.max_points for one in graded.exercises)
    graded.notes = todo.notes + [plain(f"{cell}: {how}; left out") for cell, how in ended.items()]
    return graded


def nothing(lesson: Lesson, student: str, error: str) -> Graded:
    """No points at all, for one reason."""
    results = [result(exercise, 0, error) for exercise in lesson.exercises]
    most = sum(one.max_points for one in results)
    return Graded(student, lesson.name, 0.0, most, results, error)


def _attempt(
    todo: Plan,
    student: str,
    limits: Limits,
    clock: Clock,
    results: dict[str, Result],
    ended: dict[str, str],
    settle: Noted,
) -> None:
    """Goes through the plan once, as far as it goes; what ends it is noted in `ended`."""
    left = [step.exercise for step in todo.steps if isinstance(step, Judge)]
    errors: dict[str, str] = {}  # by cell
    at = ""
    try:
        with Notebook(student, limits, clock) as notebook:
            for step in todo.steps:
                left = [exercise for exercise in left if exercise not in results]
                if not left:
                    return
                at = step.cell
                if isinstance(step, Run):
                    if step.cell not in ended:
                        _run(notebook, step, errors)
                elif step.exercise not in results:
                    at = step.exercise
                    settle(_judge(notebook, step, errors, ended))
    except Gone as gone:
        if at in EXERCISES:
            settle(result(at, 0, f"Your code was tried, and {gone}."))
        elif at:
            ended[at] = str(gone)
        else:
            ended["the start"] = str(gone)


def _run(notebook: Notebook, step: Run, errors: dict[str, str]) -> None:
    try:
        notebook.run(step.source)
    except Failed as error:
        errors[step.cell] = str(error)


def _judge(
    notebook: Notebook, step: Judge, errors: dict[str, str], ended: dict[str, str]
) -> Result:
    if how := ended.get(step.cell):
        return result(step.exercise, 0, f"The cell of this exercise was run, and {how}.")
    try:
        verdict = notebook.verdict(step.exercise, step.expression)
    except Failed as error:
        words = errors.get(step.cell, str(error))
        return result(step.exercise, 0, f"The cell of this exercise stopped: {words}")
    return result(step.exercise, float(verdict), reason(verdict))


def reason(verdict: Verdict) -> str:
    """A verdict's words, without the head that repeats points and title."""
    words = verdict.text.partition("\n")[2].replace("\n", " ").strip()
    return words if verdict.status == FAILED and words else verdict.status


def lessons_in(folder: Path) -> Iterator[Lesson]:
    """The released lessons in a folder, in order. ValueError where there is none."""
    paths = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise ValueError(
            f"{folder} holds no lessons: name the released ones, as in --lessons lessons"
        )
    for path in paths:
        try:
            lesson = Lesson.load(path)
        except Unreadable as error:
            raise ValueError(f"{path}: {error}") from None
        if unknown := [one for one in lesson.exercises if one not in EXERCISES]:
            raise ValueError(f"{path} has an exercise {unknown[0]}, which this package has not")
        yield lesson
