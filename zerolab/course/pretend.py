"""A class that does not exist, to try grading on before term.

    python -m zerolab.course.pretend DIR                            30 submissions of lesson 05
    python -m zerolab.course.pretend DIR --lesson 04 --learners 12

DIR/<learner>/<lesson>.ipynb are the submissions: right, half right and untouched ones, and every
kind of hostile or broken one. DIR/expected.csv says what a fair grade of each is. It follows from
which exercises were filled in with what; nothing is run and nothing is graded here.

Run no hostile notebook outside of a sandbox, although each is bounded (`pretend_hostile`).
"""

from __future__ import annotations

import argparse
import copy
import csv
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from zerolab.course.derive import STUB, derive, read, without_outputs
from zerolab.course.pretend_answers import NEAR_MISSES, STUCK
from zerolab.course.pretend_hostile import CHEATS, HARM, Cheat
from zerolab.course.release import ReleaseError, find_clone

NORMAL = ("right", "half", "untouched")
BROKEN = (
    "not a notebook", "cells removed", "cells twice", "cells in another order", "ids renamed",
    "another language", "an old release", "submitted twice", "nothing submitted",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One exercise as a notebook has it: its number, points, and its two cells' places."""

    number: str
    points: float
    cell: int
    check: int


@dataclass
class Submission:
    """What one learner hands in: files by name (None: no file), and a fair grade of it."""

    learner: str
    kind: str
    files: dict[str, Any] = field(default_factory=dict)
    points: dict[str, float] = field(default_factory=dict)
    error: bool = False  # it cannot be graded at all, and a person must hear of it
    why: str = ""


class Lesson:
    """A lesson's solution, the stubs that learners get, and where its exercises stand."""

    def __init__(self, solution: Path) -> None:
        self.name = solution.name
        source = without_outputs(read(solution))
        self.stubs = derive(source, solution)
        by_id = {cell.id: cell for cell in source.cells}
        places = {
            cell.metadata.nbgrader.grade_id: place
            for place, cell in enumerate(self.stubs.cells)
            if "nbgrader" in cell.metadata
        }
        self.tasks, self.answers = [], {}
        for grade_id, place in places.items():
            if grade_id.startswith("ex-"):
                number = grade_id.removeprefix("ex-").replace("-", ".", 1)
                at = places[f"check-{grade_id.removeprefix('ex-')}"]
                points = float(self.stubs.cells[at].metadata.nbgrader.points)
                self.tasks.append(Task(number, points, place, at))
                lines = by_id[self.stubs.cells[place].id].source.split("\n")
                self.answers[number] = "\n".join(
                    x for x in lines if not x.strip().startswith("###")
                )

    def notebook(self, learner: str, sources: dict[str, str]) -> Any:
        """A learner's notebook: these sources of exercises, stubs for all others, their own id."""
        nb = copy.deepcopy(self.stubs)
        for task in self.tasks:
            if task.number in sources:
                nb.cells[task.cell].source = sources[task.number]
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.source = re.sub(
                    r'^learner = ""', f'learner = "{learner}"', cell.source, flags=re.MULTILINE
                )
        return nb

    def with_body(self, task: Task, body: str) -> str:
        """The exercise's cell with this in place of the stub, or of each stub that it has."""
        stub = re.escape(STUB["code"])

        def indented(found: re.Match[str]) -> str:
            return "\n".join(found[1] + line if line else "" for line in body.split("\n"))

        return re.sub(rf"^(\s*){stub}$", indented, self.stubs.cells[task.cell].source, flags=re.M)


def pretend(
    folder: Path, lesson: str = "05", learners: int = 30, seed: int = 0
) -> list[Submission]:
    """Fills a new or empty folder with a class; the same class for the same arguments."""
    if learners < 1:
        raise ReleaseError(f"A class of {learners} hands in nothing: ask for at least one learner.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ReleaseError(f"{folder} is not empty: name a new or an empty folder.")
    solutions = sorted((find_clone() / "solutions").glob("*.ipynb"))
    chosen = [path for path in solutions if path.name.startswith(lesson)]
    if len(chosen) != 1:
        raise ReleaseError(f"No single lesson's name begins with {lesson!r}: write it as in 05.")
    submissions = make_class(Lesson(chosen[0]), learners, seed)
    for each in submissions:
        (folder / each.learner).mkdir(parents=True)
        for name, content in each.files.items():
            # nbformat.v4 writes what it is given; nbformat itself would repair ids.
            text = content if isinstance(content, str) else nbformat.v4.writes(content) + "\n"
            (folder / each.learner / name).write_text(text, encoding="utf-8")
    with (folder / "expected.csv").open("w", newline="", encoding="utf-8") as file:
        write_expected(submissions, file)
    return submissions


def make_class(lesson: Lesson, learners: int, seed: int) -> list[Submission]:
    """One of each normal kind first, then every other kind, then more of the normal ones."""
    draw = random.Random(f"{seed} {lesson.name}")
    kinds = [*NORMAL, *HARM, *CHEATS, *BROKEN][:learners]
    kinds += draw.choices(NORMAL, weights=(4, 5, 1), k=learners - len(kinds))
    draw.shuffle(kinds)
    width = len(str(learners))
    return [_one(lesson, f"learner{i:0{width}}", kind, draw) for i, kind in enumerate(kinds, 1)]


def _one(lesson: Lesson, learner: str, kind: str, draw: random.Random) -> Submission:
    sources = {} if kind == "untouched" else dict(lesson.answers)
    points = {task.number: task.points if sources else 0.0 for task in lesson.tasks}
    made = Submission(learner, kind, points=points)
    if kind == "half":
        _half(lesson, made, sources, draw)
    elif kind in HARM:
        # Not the first, so that something stands before it, and something after it.
        task = lesson.tasks[min(1, len(lesson.tasks) - 1)]
        harm = HARM[kind]
        stub = lesson.stubs.cells[task.cell].source
        called = lesson.with_body(task, f"{harm.code}\n{STUB['code']}")
        sources[task.number] = called if harm.when_called else f"{harm.code}\n\n\n{stub}"
        points[task.number] = 0
        made.why = f"{task.number} is lost, and all others count: {harm.why}"
    elif kind in CHEATS:
        cheat = CHEATS[kind]
        for task in lesson.tasks[1:] or lesson.tasks:
            body = cheat.body.format(notebook=lesson.name, cell=lesson.stubs.cells[task.cell].id)
            sources[task.number] = lesson.with_body(task, body or STUB["code"])
            points[task.number] = 0
        made.why = cheat.why
    nb = lesson.notebook(learner, sources)
    if kind in CHEATS:
        _cheat(lesson, nb, CHEATS[kind])
    made.files[lesson.name] = nb
    if kind in BROKEN:
        _break(lesson, made, nb, sources)
    return made


def _half(lesson: Lesson, made: Submission, sources: dict[str, str], draw: random.Random) -> None:
    """At least one is right and one is not; the others right, nearly right, stuck or untouched."""
    kept, lost = draw.sample(lesson.tasks, 2)
    told = []
    for task in lesson.tasks:
        fates = ["near", "stuck", "stub"] if task is lost else ["right", "near", "stuck", "stub"]
        fate = draw.choice(fates)
        if task is kept or fate == "right":
            continue
        if fate == "near" and task.number in NEAR_MISSES:
            body, earned = draw.choice(NEAR_MISSES[task.number])
        elif fate == "stub":
            body, earned = STUB["code"], 0
        else:
            body, earned, fate = STUCK, 0, "stuck"
        sources[task.number] = lesson.with_body(task, body)
        made.points[task.number] = earned
        told.append(f"{task.number} {fate}")
    made.why = ", ".join(told)


def _cheat(lesson: Lesson, nb: Any, cheat: Cheat) -> None:
    """The cell before the first exercise, and the check cells, as the cheat has them."""
    if cheat.locked:
        for task in lesson.tasks:
            nb.cells[task.check].source = cheat.locked.format(points=f"{task.points:g}")
    if cheat.code:
        first = lesson.tasks[0].cell
        nb.cells.insert(first, nbformat.v4.new_code_cell(cheat.code, id="my-own-cell"))


def _break(lesson: Lesson, made: Submission, nb: Any, sources: dict[str, str]) -> None:
    last, cells = lesson.tasks[-1], nb.cells
    if made.kind == "not a notebook":
        made.files[lesson.name] = nbformat.v4.writes(nb)[:-2000]
        made.error, made.why = True, "the file ends in the middle, so nothing of it can be read"
    elif made.kind == "nothing submitted":
        made.files.clear()
        made.error, made.why = True, "there is a folder and no notebook in it"
    elif made.kind == "another language":
        nb.metadata["kernelspec"] = {"display_name": "R", "language": "R", "name": "ir"}
        nb.metadata["language_info"] = {"name": "R"}
        for task in lesson.tasks:
            cells[task.cell].source = "prediction <- function() 2 + 2 + 12 / 4"
        made.error, made.why = True, "it wants a kernel for R, and the course has none"
    elif made.kind in ("cells removed", "an old release"):
        gone = [last] if made.kind == "cells removed" else lesson.tasks[len(lesson.tasks) // 2 :]
        for place in sorted((p for t in gone for p in (t.cell, t.check)), reverse=True):
            del cells[place]
        made.points |= {task.number: 0 for task in gone}
        made.why = f"without {', '.join(task.number for task in gone)}; all that is there is right"
    elif made.kind == "cells twice":
        cells.insert(last.cell + 1, copy.deepcopy(cells[last.cell]))
        made.why = f"the cell of {last.number} is there twice, both right, with one id"
    elif made.kind == "cells in another order":
        checks = [cells[task.check] for task in lesson.tasks]
        nb.cells = [cell for cell in cells if cell not in checks] + checks[::-1]
        made.why = "the check cells stand at the end, the last one first"
    elif made.kind == "ids renamed":
        for place, cell in enumerate(cells):
            cell["id"] = f"renamed-{place}"
            cell.metadata.pop("nbgrader", None)
        made.why = "as after a conversion: the check cells still say which answer is whose"
    else:
        copied = lesson.notebook(made.learner, sources | dict.fromkeys([last.number], STUCK))
        made.files[lesson.name.replace(".ipynb", "-Copy1.ipynb")] = copied
        made.why = "the file with the lesson's own name counts, and the copy is only reported"
    if made.error:
        made.points = dict.fromkeys(made.points, 0.0)


def write_expected(submissions: list[Submission], file: Any) -> None:
    """A row for each learner: points, and for each exercise; `error` where a person must look."""
    numbers = list(submissions[0].points)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["student", "points", "error", *numbers, "kind", "why"])
    for each in submissions:
        points = [each.points[number] for number in numbers]
        cells = [f"{value:g}" for value in (sum(points), *points)]
        error = "yes" if each.error else "no"
        writer.writerow([each.learner, cells[0], error, *cells[1:], each.kind, each.why])


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence where there can be no class."""
    parser = argparse.ArgumentParser(prog="python -m zerolab.course.pretend")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    parser.add_argument("--lesson", default="05", help="beginning of its name (default 05)")
    parser.add_argument("--learners", type=int, default=30, help="how many (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="another class (default 0)")
    args = parser.parse_args(argv)
    try:
        made = pretend(args.folder, args.lesson, args.learners, args.seed)
    except ReleaseError as error:
        print(f"pretend: {error}", file=sys.stderr)
        return 2
    hostile = sum(each.kind in HARM for each in made)
    print(f"{args.folder}: {len(made)} submissions, and expected.csv with a fair grade of each.")
    if hostile:
        print(f"{hostile} of them would do harm: open and run them in a sandbox only.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
