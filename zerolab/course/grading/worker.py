"""Grades notebooks one after the other, as it is told: `python -m … .worker`.

A process of its own, so that a judge that never ends, or needs too much memory, costs one exercise.
The verdicts are made here; learners' code runs in the sandboxes below it.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from zerolab.course.checks import core
from zerolab.course.grading import channel
from zerolab.course.grading.judging import Clock
from zerolab.course.grading.notebook import Result, grade_notebook
from zerolab.course.grading.sandbox import Limits
from zerolab.course.grading.submission import Lesson

MEMORY_BYTES = 8 * 2**30
JUDGE_S = 20.0  # of the judge's own processor time; most need less than 2


def main() -> None:
    """Each request is one notebook; each exercise is answered as soon as it is judged."""
    source, sink = channel.take()
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    core.before_each.clear()  # the ranks of this process meet no learner's code: no need for new
    while True:
        try:
            request, _ = channel.receive(lambda size: channel.read(source, size))
        except EOFError:
            return
        channel.send(sink, {"graded": _grade(request, sink)})


def _grade(request: Any, sink: Any) -> Any:
    clock = Clock(request["left_s"])

    def noted(one: Result) -> None:
        channel.send(sink, {"result": vars(one), "left_s": clock.left_s})
        _wind_up()

    _wind_up()
    done = {one["id"]: Result(**one) for one in request["done"]}
    lesson = Lesson.load(Path(request["lesson"]))
    limits, path = Limits(), Path(request["path"])
    student = request["student"]
    return grade_notebook(lesson, path, student, limits, done, noted, clock).as_dict()


def _wind_up() -> None:
    """Ends this process unless the next verdict is there within JUDGE_S of its own time.

    A number or a formula may keep one operation busy for ever, which no exception interrupts.
    """
    if hasattr(signal, "ITIMER_PROF"):
        signal.setitimer(signal.ITIMER_PROF, JUDGE_S)


if __name__ == "__main__":
    main()
    channel.stop()
