"""Grades as a table, and as a page for each learner."""

from __future__ import annotations

import csv
import hashlib
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from zerolab.course.checks import EXERCISES
from zerolab.course.grading.notebook import Graded

FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"  # and their full-width forms
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }}
td, th {{ border: 1px solid #999; padding: .3rem .6rem; text-align: left; vertical-align: top }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def by_student(grades: Iterable[Graded]) -> dict[str, list[Graded]]:
    """Each learner's notebooks, learners in order of their ids."""
    students: dict[str, list[Graded]] = {}
    for graded in grades:
        students.setdefault(graded.student, []).append(graded)
    return dict(sorted(students.items()))


def table(grades: Sequence[Graded], everybody: Sequence[str] = ()) -> list[list[str]]:
    """A row for each learner: points by lesson, their sum, what the lessons have, and remarks.

    `everybody` are learners who have a row even without a notebook.
    """
    lessons = sorted({graded.notebook for graded in grades if graded.max_points})
    most = {g.notebook: g.max_points for g in grades if g.max_points}
    found = by_student(grades)
    rows = [["student", *lessons, "points", "max_points", "remarks"]]
    for student in sorted({*found, *everybody}):
        own = found.get(student, [])
        points = {g.notebook: g.points for g in own if g.max_points}
        remarks = [words for g in own for words in ([g.error] if g.error else g.notes)]
        if not own:
            remarks = ["no notebook was handed in"]
        rows.append([
            student,
            *(f"{points[name]:g}" if name in points else "" for name in lessons),
            f"{sum(points.values()):g}",
            str(sum(most.values())),
            "; ".join(remarks),
        ])  # fmt: skip
    return rows


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Whole or not at all. No cell begins as a formula would: spreadsheets run those."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", newline="", encoding="utf-8") as file:
        safe = [["'" + cell if cell.lstrip()[:1] in FORMULA and cell.strip() else cell
                 for cell in row] for row in rows]  # fmt: skip
        csv.writer(file).writerows(safe)
    os.replace(fresh, path)


def write_feedback(folder: Path, grades: Sequence[Graded]) -> int:
    """A page for each learner, named by their id; returns how many.

    RuntimeError, in one sentence, for the first that cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    students, taken = by_student(grades), set[str]()
    for student, own in students.items():
        title = html.escape(f"Feedback for {student}")
        page = PAGE.format(title=title, body="".join(map(_section, own)))
        name = "".join(c if c.isalnum() or c in "-_.@" else "_" for c in student)[:60]
        if name != student or name.casefold() in taken:  # nobody's page replaces another's
            name += "-" + hashlib.sha256(student.encode()).hexdigest()[:8]
        taken.add(name.casefold())
        path = folder / f"{name}.html"
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise RuntimeError(
                f"the page {path} cannot be written: {error.strerror}; the grades are complete: "
                "put that right and run it again for the pages"
            ) from None
    return len(students)


def _section(graded: Graded) -> str:
    head = f"<h2>{html.escape(graded.notebook)}: {graded.points:g} of {graded.max_points}</h2>"
    remarks = [graded.error] if graded.error else graded.notes
    words = "".join(f"<p>{html.escape(text)}</p>" for text in remarks)
    rows = "".join(
        f"<tr><td>{r.id} {html.escape(EXERCISES[r.id].title)}</td>"
        f"<td>{r.points:g} of {r.max_points}</td><td>{html.escape(r.reason)}</td></tr>"
        for r in graded.exercises
    )
    if not rows:
        return head + words
    names = "<tr><th>Exercise</th><th>Points</th><th>Why</th></tr>"
    return f"{head}{words}<table>{names}{rows}</table>"
