"""Processes that judge notebooks, one each at a time, for a class."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolab.course.grading import channel
from zerolab.course.grading.judging import Clock
from zerolab.course.grading.notebook import Graded, Result, nothing, result
from zerolab.course.grading.sandbox import own_environment
from zerolab.course.grading.submission import Lesson

MOST_JUDGES = 4  # processes that one notebook may cost before the rest of it is given up
SILENCE_S = 300.0  # of a worker; the sandboxes' own limits are far below


@dataclass(frozen=True)
class Submission:
    """One notebook of one student for one lesson; `refused` says why it is not graded.

    `passed_over` are the student's further notebooks for the lesson.
    """

    student: str
    path: Path
    lesson: Lesson | None
    refused: str = ""
    passed_over: tuple[str, ...] = ()


def graded_from(kept: dict[str, Any]) -> Graded:
    """What `Graded.as_dict` wrote."""
    exercises = [Result(**one) for one in kept["exercises"]]
    return Graded(**{**kept, "exercises": exercises})


class Worker:
    """A process that judges; after one that fell silent the next begins where it was."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""  # of the process: gone with it, however it ends

    def grade(
        self, one: Submission, lesson: Lesson, release: Path, stop: threading.Event
    ) -> Graded | None:
        """The grade; None where `stop` was set before there was one."""
        done: list[Result] = []
        clock = Clock()
        for _ in range(MOST_JUDGES):
            self._start()
            try:
                return self._ask(one, release, done, clock, stop)
            except (OSError, EOFError, channel.Garbled):
                self.close()
                if stop.is_set():
                    return None
            judged = {result.id for result in done}
            left = [exercise for exercise in lesson.exercises if exercise not in judged]
            if not left:
                break
            why = "the judge of this exercise did not come to an end: see what the answer returns"
            done.append(result(left[0], 0, why))
        graded = nothing(lesson, one.student, f"{one.path.name}: the grader itself failed on it")
        judged_so_far = {result.id: result for result in done}
        graded.exercises = [judged_so_far.get(r.id, r) for r in graded.exercises]
        graded.points = sum(r.points for r in graded.exercises)
        return graded

    def _start(self) -> None:
        """RuntimeError where the system starts no process: no fault of any notebook's."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "zerolab.course.grading.worker"]
        try:
            self._scratch = tempfile.mkdtemp(prefix="zerolab-grade-")
            own = {"ZEROLAB_PROGRESS": "off", "TMPDIR": self._scratch}
            environment = {**own_environment(), **own}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RuntimeError(f"no process for a judge could be started: {error}") from None

    def _ask(
        self, one: Submission, release: Path, done: list[Result], clock: Clock,
        stop: threading.Event,
    ) -> Graded:  # fmt: skip
        assert self._process
        process = self._process
        assert process.stdin and process.stdout
        request = {"lesson": str(release), "path": str(one.path), "student": one.student,
                   "done": [vars(result) for result in done], "left_s": clock.left_s}  # fmt: skip
        channel.send(process.stdin, request)  # type: ignore[arg-type]
        out = process.stdout.fileno()
        while True:
            heard = time.monotonic()

            def piece(size: int, heard: float = heard) -> bytes:
                got = b""
                while len(got) < size:
                    if stop.is_set() or time.monotonic() > heard + SILENCE_S:
                        raise OSError("silent")
                    if select.select([out], [], [], 0.2)[0]:
                        more = os.read(out, size - len(got))
                        if not more:
                            raise EOFError
                        got += more
                return got

            message, _ = channel.receive(piece)
            if "graded" in message:
                return graded_from(message["graded"])
            done.append(Result(**message["result"]))
            clock.left_s = message["left_s"]

    def close(self) -> None:
        """Ends the worker, and with it its sandboxes."""
        if self._process is None:
            return
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process = None
        for _ in range(50):  # what the worker had started ends just after it, and writes till then
            shutil.rmtree(self._scratch, ignore_errors=True)
            if not os.path.exists(self._scratch):
                break
            time.sleep(0.1)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
