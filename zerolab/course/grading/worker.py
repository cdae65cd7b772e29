"""Grades notebooks one after the other, as it is told: `python -m … .worker`.

A process of its own, so that a judge that never ends, or needs too much memory, costs one exercise.
The verdicts are made here; learners' code runs in the sandboxes below it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from zerolab.course.checks import core
from zerolab.course.grading import channel
from zerolab.course.grading.notebook import Result, grade_notebook
from zerolab.course.grading.sandbox import Limits
from zerolab.course.grading.submission import Lesson

MEMORY_BYTES = 8 * 2**30


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
    def noted(one: Result) -> None:
        channel.send(sink, {"result": vars(one)})

    done = {one["id"]: Result(**one) for one in request["done"]}
    lesson = Lesson.load(Path(request["lesson"]))
    limits, path = Limits(), Path(request["path"])
    return grade_notebook(lesson, path, request["student"], limits, done, noted).as_dict()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
