"""What the learner has done so far: the best points of each exercise, in one small file.

`check` writes it, on the learner's own machine; no answer is stored. The file lies in Jupyter's
data folder, or where the environment variable ZEROLAB_PROGRESS says; "off" keeps none. Nothing
here raises: whatever happens to the file, a check goes on.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "ZEROLAB_PROGRESS"
_said: set[str] = set()


@dataclass(frozen=True)
class Best:
    """The most points that an exercise has earned, and how often it was tried."""

    points: float
    tries: int


def file_of_progress() -> Path | None:
    """Where progress is kept; None where none is: under tests, and in the solutions."""
    chosen = os.environ.get(VARIABLE, "").strip()
    notebook = Path(os.environ.get("JPY_SESSION_NAME", ""))  # JupyterLab says which one runs
    if chosen == "off" or notebook.parent.name == "solutions":
        return None
    if chosen:
        return Path(chosen).expanduser()
    from jupyter_core.paths import jupyter_data_dir

    return Path(jupyter_data_dir(), "zerolab", "progress.json")


def record(number: str, points: float) -> None:
    """Adds an attempt at an exercise; of its points the best are kept."""
    try:
        file = file_of_progress()
        if file is None:
            return
        best = _read(file)
        before = best.get(number, Best(0, 0))
        best[number] = Best(max(before.points, float(points)), before.tries + 1)
        kept = {name: vars(best[name]) for name in sorted(best)}
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        part.replace(file)  # in one go: another notebook reads the old file or the new one
    except Exception as error:
        _say(f"Your progress is not kept ({error}); checks work all the same.")


def _read(file: Path) -> dict[str, Best]:
    """The best of each exercise; a damaged file is set aside, and nothing is known then.

    OSError for what is there and is no plain file: it is neither read nor moved.
    """
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is no plain file")
    try:
        return {
            str(number): _best(**kept) for number, kept in json.loads(file.read_bytes()).items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError):
        places = (file.with_name(f"{file.stem}-damaged-{n}.json") for n in range(1, 1000))
        aside = next(place for place in places if not place.exists())
        file.replace(aside)
        _say(f"The file of your progress was damaged; it is kept as {aside}, and a new one begins.")
        return {}


def _best(points: Any, tries: Any) -> Best:
    if not (math.isfinite(points) and points >= 0 and isinstance(tries, int) and tries > 0):
        raise ValueError("no points and tries")
    return Best(float(points), tries)


def _say(sentence: str) -> None:
    """Once in a session, and beside the verdict, not in it."""
    if sentence not in _said:
        _said.add(sentence)
        print(sentence, file=sys.stderr)


@dataclass(frozen=True)
class Row:
    """A lesson so far: exercises passed, tried and in all; points earned and in all."""

    lesson: str
    passed: int
    tried: int
    exercises: int
    points: float
    of: int


@dataclass(frozen=True)
class Progress:
    """All lessons that have exercises, the first exercise that is open, and where it is kept."""

    rows: tuple[Row, ...]
    next_one: str
    kept: str

    def __repr__(self) -> str:
        lines = [f"{'lesson':32} {'passed':>8} {'tried':>6} {'points':>9}"]
        for r in self.rows:
            passed, points = f"{r.passed} of {r.exercises}", f"{r.points:g} of {r.of}"
            lines.append(f"{r.lesson:32} {passed:>8} {r.tried:>6} {points:>9}")
        return "\n".join([*lines, "", self.next_one, self.kept])

    def _repr_markdown_(self) -> str:
        head = "| lesson | exercises passed | tried | points |\n|---|---|---|---|\n"
        rows = (f"| {r.lesson} | {r.passed} of {r.exercises} | {r.tried} | {r.points:g} of {r.of} |"
                for r in self.rows)  # fmt: skip
        return head + "\n".join(rows) + f"\n\n{self.next_one}\n\n{self.kept}"


def progress() -> Progress:
    """What you have done so far, and what comes next."""
    from zerolab.course.checks import EXERCISES
    from zerolab.course.outline import LESSONS

    best: dict[str, Best] = {}
    try:
        file = file_of_progress()
        best = _read(file) if file else {}
        kept = f"Kept in {file}; no answers are in it." if file else "Progress is not kept here."
    except Exception as error:
        kept = f"Your progress cannot be read ({error})."
    tasks = sorted(EXERCISES.values(), key=lambda task: task.number)
    done = {t.number for t in tasks if t.number in best and best[t.number].points >= t.points}
    rows = []
    for number in sorted({task.number[:2] for task in tasks}):
        own = [task for task in tasks if task.number[:2] == number]
        rows.append(Row(
            lesson=f"{number} {LESSONS[number].name}" if number in LESSONS else number,
            passed=sum(task.number in done for task in own),
            tried=sum(task.number in best for task in own),
            exercises=len(own),
            points=sum(min(best[t.number].points, t.points) for t in own if t.number in best),
            of=sum(task.points for task in own),
        ))  # fmt: skip
    left = next((task for task in tasks if task.number not in done), None)
    words = f"Next: {left.number}, {left.title}." if left else "All exercises are passed."
    return Progress(tuple(rows), words, kept)
