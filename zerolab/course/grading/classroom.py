"""Grades a class: finds the notebooks, has workers grade them, and keeps what is done already."""

from __future__ import annotations

import contextlib
import csv
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import zerolab
from zerolab.course.grading import channel
from zerolab.course.grading.judging import Clock
from zerolab.course.grading.notebook import Graded, Result, lessons_in, nothing, result
from zerolab.course.grading.store import Store, graded_from
from zerolab.course.grading.submission import Lesson, Unreadable, code_cells, plain, read

MOST_JUDGES = 4  # processes that one notebook may cost before the rest of it is given up
SILENCE_S = 300.0  # of a worker; the sandboxes' own limits are far below
FLAT = re.compile(r"(?P<student>.+?)[-_ ]+(?P<lesson>\d\d_.+)")
Told = Callable[[Graded, int, int], None]


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


def released() -> Path:
    """The lessons beside this package, or in the folder where one works."""
    beside = Path(zerolab.__file__).parents[1] / "lessons"
    return beside if beside.is_dir() else Path("lessons")


def find_submissions(folder: Path, lessons: Sequence[Lesson]) -> list[Submission]:
    """All notebooks below a folder: STUDENT/…/05_stage_1.ipynb, or STUDENT_05_stage_1.ipynb.

    Raises ValueError, in one sentence, where there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name the one with the learners' notebooks")
    paths = sorted(
        path for path in folder.rglob("*.ipynb")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )  # fmt: skip
    if not paths:
        raise ValueError(
            f"{folder} holds no notebooks: put each learner's into a folder named by their id, "
            "as in ada/05_stage_1.ipynb"
        )
    found = [_recognise(path, folder, lessons) for path in paths]
    for inner in sorted(folder.iterdir()):
        if (
            inner.is_dir()
            and inner.name[0] not in "._"
            and plain(inner.name) not in _students(found)
        ):
            why = "its folder holds no notebook"
            if inner.is_symlink():
                why = "its folder is a link, which is not followed"
            found.append(Submission(plain(inner.name), inner, None, why))
    return sorted(_once_each(found), key=lambda s: (s.student, str(s.path)))


def _students(found: Sequence[Submission]) -> set[str]:
    return {one.student for one in found}


def _recognise(path: Path, folder: Path, lessons: Sequence[Lesson]) -> Submission:
    inner = path.relative_to(folder).parts
    flat = FLAT.fullmatch(path.stem) if len(inner) == 1 else None
    student = inner[0] if len(inner) > 1 else flat["student"] if flat else folder.resolve().name
    stem = flat["lesson"] if flat else path.stem
    student = plain(student)
    number = re.match(r"\d\d(?=\D|$)", stem)
    by_name = [lesson for lesson in lessons if number and lesson.name[:2] == number[0]]
    if by_name:
        return Submission(student, path, by_name[0])
    try:
        names = {cell.name for cell in code_cells(read(path))}
    except Unreadable as error:
        return Submission(student, path, None, str(error))
    shared = [len(names & set(lesson.checks)) for lesson in lessons]
    if not max(shared):
        why = "it has none of this course's exercises, and its name begins with no lesson's number"
        return Submission(student, path, None, why)
    return Submission(student, path, lessons[shared.index(max(shared))])


def _once_each(found: list[Submission]) -> Iterator[Submission]:
    """Of several notebooks of one learner for one lesson the one with its name counts, or else the
    newest."""
    by_lesson: dict[tuple[str, str], list[Submission]] = {}
    for one in found:
        if one.lesson is None:
            yield one
        else:
            by_lesson.setdefault((one.student, one.lesson.name), []).append(one)
    for several in by_lesson.values():
        several.sort(key=_precedence)
        *others, chosen = several
        yield replace(chosen, passed_over=tuple(plain(other.path.name) for other in others))


def _precedence(one: Submission) -> tuple[bool, float, str]:
    named = one.lesson is not None and one.path.stem == one.lesson.name
    return named, one.path.lstat().st_mtime, str(one.path)


def read_class_list(path: Path) -> list[str]:
    """The learners' ids from a CSV with a column "student". ValueError, in one sentence."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or []
            if "student" not in columns:
                raise ValueError(
                    f"{path} has no column student, only {', '.join(columns) or 'nothing'}: "
                    "name the column of the learners' ids so"
                )
            return [name for row in rows if (name := (row["student"] or "").strip())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from None


def grade_class(
    submissions: Sequence[Submission],
    folder: Path,
    store: Store,
    workers: int = 2,
    told: Told = lambda *_: None,
) -> list[Graded]:
    """Grades all, in order of students and lessons. Whatever is in one stops none of the others.

    `folder` holds the released lessons. `told` hears of each grade, with how many are done of all.
    """
    grades: dict[int, Graded] = {}
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    lock, stop = threading.Lock(), threading.Event()

    def settle(place: int, graded: Graded) -> None:
        for name in submissions[place].passed_over:
            graded.notes.append(f"{name} is another notebook for this lesson and was not graded")
        with lock:
            grades[place] = graded
            told(graded, len(grades), len(submissions))

    keys: dict[int, Path | None] = {}
    failed: list[BaseException] = []
    for place, one in enumerate(submissions):
        if one.lesson is None:
            settle(place, Graded(one.student, plain(one.path.name), error=one.refused))
            continue
        keys[place] = store.key(one, folder / f"{one.lesson.name}.ipynb")
        if kept := store.load(keys[place]):
            settle(place, kept)
        else:
            jobs.put(place)

    def work(over: threading.Event) -> None:
        try:
            take_jobs()
        except BaseException as error:
            failed.append(error)
            stop.set()
        finally:
            over.set()

    def take_jobs() -> None:
        with _Worker() as worker:
            while not stop.is_set():
                try:
                    place = jobs.get_nowait()
                except queue.Empty:
                    return
                one = submissions[place]
                assert one.lesson
                graded = worker.grade(one, one.lesson, folder / f"{one.lesson.name}.ipynb", stop)
                if graded:
                    if not graded.error:  # else it is tried again
                        store.save(keys[place], graded)
                    settle(place, graded)

    # Events, since a join that Ctrl-C interrupts takes a thread at work for one that has ended.
    ends = [threading.Event() for _ in range(min(workers, jobs.qsize()))]

    def wait() -> None:
        for over in ends:
            while not over.wait(0.1):
                pass

    for over in ends:
        threading.Thread(target=work, args=(over,)).start()
    try:
        wait()
    except BaseException:
        stop.set()
        with _no_second_interrupt():  # which would leave things behind
            wait()
        raise
    if failed:
        raise failed[0]
    return [grades[place] for place in sorted(grades)]


@contextlib.contextmanager
def _no_second_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker:
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
        places = os.pathsep.join(p for p in sys.path if p)
        try:
            self._scratch = tempfile.mkdtemp(prefix="zerolab-grade-")
            environment = {**os.environ, "PYTHONPATH": places, "ZEROLAB_PROGRESS": "off",
                           "TMPDIR": self._scratch}  # fmt: skip
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

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["Store", "Submission", "find_submissions", "grade_class", "lessons_in"]
