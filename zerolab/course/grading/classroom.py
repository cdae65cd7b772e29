"""Grades a class: finds the notebooks, has workers grade them, and keeps what is done already."""

from __future__ import annotations

import csv
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import zerolab
from zerolab.course.grading.judges import Submission, Worker
from zerolab.course.grading.notebook import Graded, lessons_in
from zerolab.course.grading.store import Store
from zerolab.course.grading.submission import Lesson, Unreadable, code_cells, plain, read

FLAT = re.compile(r"(?P<student>.+?)[-_ ]+(?P<lesson>\d\d_.+)")
Told = Callable[[Graded, int, int], None]


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
        with Worker() as worker:
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
    ends: list[threading.Event] = []

    def wait() -> None:
        for over in ends:
            while not over.wait(0.1):
                pass

    try:
        for _ in range(min(workers, jobs.qsize())):
            over = threading.Event()
            threading.Thread(target=work, args=(over,)).start()
            ends.append(over)
        wait()
    except BaseException:
        stop.set()
        wait()
        raise
    if failed:
        raise failed[0]
    return [grades[place] for place in sorted(grades)]


__all__ = ["Store", "Submission", "find_submissions", "grade_class", "lessons_in"]
