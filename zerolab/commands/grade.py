"""zerolab grade: a folder of notebooks in, grades and feedback out."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolab.commands import expect_folder


def add_grade(commands: Any) -> None:
    grade = commands.add_parser("grade", help="grade a folder of learners' notebooks")
    grade.add_argument("folder", type=Path, metavar="DIR", help="as in DIR/ada/05_stage_1.ipynb")
    grade.add_argument("--out", type=Path, help="write the table here; a second run goes on")
    grade.add_argument("--feedback", type=Path, metavar="DIR", help="write a page for each learner")
    grade.add_argument("--json", action="store_true", help="print each notebook's grade as JSON")
    grade.add_argument("--class", type=Path, dest="class_list", metavar="FILE",
                       help="CSV of learners, column student: all of them get a row")  # fmt: skip
    grade.add_argument("--lessons", type=Path, metavar="DIR", help="the lessons as released")
    grade.add_argument("-j", type=int, default=2, metavar="N", help="notebooks at once (default 2)")
    grade.set_defaults(run=run)


def run(a: argparse.Namespace) -> int:
    """Exit 0 where every notebook could be graded, 1 where one could not."""
    with _one_stop():
        return _grade(a)


@contextlib.contextmanager
def _one_stop() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does; a second of either would leave things behind."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    heard = [one for one, how in before.items() if how not in (signal.SIG_IGN, None)]

    def stop(*_: object) -> None:
        for one in heard:
            signal.signal(one, lambda *_: None)
        raise KeyboardInterrupt

    for one in heard:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one in heard:
            signal.signal(one, before[one])


def _grade(a: argparse.Namespace) -> int:
    from zerolab.course.grading import classroom, report, sandbox

    if a.j < 1:
        raise ValueError(f"-j must be at least 1, not {a.j}")
    _expect_places(a.out, a.feedback)
    release = a.lessons or classroom.released()
    lessons = list(classroom.lessons_in(release))
    everybody = classroom.read_class_list(a.class_list) if a.class_list else []
    found = classroom.find_submissions(a.folder, lessons)
    if why := sandbox.trusted_only():
        print(
            f"zerolab grade: warning: no sandbox here ({why}): learners' code runs with your "
            "rights. Grade on Linux, in a container or a virtual machine of its own.",
            file=sys.stderr,
        )
    kept = a.out.with_suffix(".parts") if a.out else None
    told = _Told()
    try:
        grades = classroom.grade_class(found, release, classroom.Store(kept), a.j, told)
    except KeyboardInterrupt:
        after = f"run it again to go on, {kept} has them" if kept else "with --out they are kept"
        after = after if told.done else "none is done"
        raise KeyboardInterrupt(f"stopped after {told.done} of {len(found)}; {after}") from None
    finally:
        told.end()
    rows = report.table(grades, everybody)
    if a.out:
        report.write_csv(a.out, rows)
    if a.json:
        print(json.dumps([graded.as_dict() for graded in grades], indent=2))
    elif a.out:
        print(f"{len(grades)} notebooks of {len(rows) - 1} learners: {a.out}")
    else:
        print(_as_text(rows))
    for name in sorted({graded.student for graded in grades} - set(everybody)) if everybody else []:
        print(f"zerolab grade: {name} is not in {a.class_list}", file=sys.stderr)
    if a.feedback:  # last: a page that cannot be written costs no grade
        report.write_feedback(a.feedback, grades)
    return 1 if any(graded.error for graded in grades) else 0


def _expect_places(out: Path | None, feedback: Path | None) -> None:
    """ValueError, before anything is graded, where the results could not be written."""
    if out:
        other = os.path.lexists(out) and not stat.S_ISREG(os.lstat(out).st_mode)
        if other or out.suffix == ".parts":  # a device or a link would be replaced by the table
            raise ValueError(f"--out {out} must be a file, such as grades.csv")
        if not out.parent.is_dir():
            raise ValueError(f"--out {out}: there is no folder {out.parent}")
        if not os.access(out.parent, os.W_OK):
            raise ValueError(f"--out {out}: the folder {out.parent} is not writable")
    if feedback:
        expect_folder("--feedback", feedback)


def _as_text(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


class _Told:
    """The progress bar, where somebody watches."""

    def __init__(self) -> None:
        self.done = 0
        self.speaks = sys.stderr.isatty()

    def __call__(self, graded: Any, done: int, total: int) -> None:
        self.done = done
        if self.speaks:
            bar = "#" * (30 * done // total)
            last = f"{graded.student} {graded.notebook}"[:40]
            print(f"\r[{bar:30}] {done} of {total}  {last:40}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.speaks and self.done:
            print(file=sys.stderr)
