"""This course under nbgrader, for an institution that has it: pip install -e '.[grading]'.

    python -m zerolab.course.nbgrader_course DIR           a course folder with all lessons
    python -m zerolab.course.nbgrader_course DIR 05 06     with these
    cd DIR && nbgrader autograde 05_zero_stage_1           what is in DIR/submitted/<student>/

nbgrader runs a learner's code and its check in one process, as the learner's own notebook does. It
is for classes that are trusted; `zerolab grade` keeps the two apart.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Any

from zerolab.course.derive import STUB
from zerolab.course.kept import PATIENCE
from zerolab.course.progress import VARIABLE
from zerolab.course.release import ReleaseError, find_clone

try:
    from nbgrader.apps import NbGraderAPI
    from nbgrader.converters import Autograde
    from nbgrader.preprocessors import Execute, NbGraderPreprocessor
    from nbgrader.utils import is_grade
    from traitlets.config import Config
except ImportError:
    sys.exit("nbgrader is not installed: python -m pip install -c constraints.txt -e '.[grading]'")

CONFIG = """# Read by nbgrader, which is to be called in this folder.
from zerolab.course.nbgrader_course import configure

configure(get_config())  # noqa: F821 -- nbgrader brings it
"""
TIMEOUT_S = 120  # for one cell; the checks have shorter limits of their own


class ForLearner(NbGraderPreprocessor):
    """Before the run: personal numbers are those of the student's id, whatever the notebook says,
    nobody's progress is written, and a slow machine costs no points."""

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        os.environ["ZEROLAB_LEARNER"] = resources["nbgrader"]["student"]  # the kernel inherits it
        os.environ[VARIABLE] = "off"
        os.environ.setdefault(PATIENCE, "3")  # nobody waits for these verdicts
        return nb, resources


class VerdictAlone(NbGraderPreprocessor):
    """After the run: a check cell is worth the number that it shows; without one, nothing.

    nbgrader by itself gives full points to a cell that only prints, or shows no number, or nan; and
    none to one that warns on stderr.
    """

    def preprocess_cell(self, cell: Any, resources: Any, index: int) -> tuple[Any, Any]:
        if cell.cell_type != "code" or not is_grade(cell):
            return cell, resources
        for output in cell.outputs:
            if output.output_type == "stream":
                output.name = "stdout"
        shown = [out for out in cell.outputs if out.output_type == "execute_result"]
        points = _number(shown[0].data.get("text/plain", "")) if shown else math.nan
        if not 0 <= points <= cell.metadata.nbgrader.points:
            said = "the check cell shows no number of points"
            error = {"output_type": "error", "ename": "NoVerdict", "evalue": said}
            # first, as nbgrader stops at the first number or error that it meets
            cell.outputs.insert(0, type(cell)(error | {"traceback": [f"NoVerdict: {said}"]}))
        return cell, resources


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def configure(config: Any) -> None:
    """What nbgrader_config.py says; and nbgrader finds alembic, which it calls by name."""
    config.CourseDirectory.course_id = "zerolab"
    config.ClearSolutions.code_stub = {"python": STUB["code"]}  # as the lessons have it
    config.Execute.timeout = TIMEOUT_S
    steps = Autograde.autograde_preprocessors.default()
    place = steps.index(Execute)
    around = [ForLearner, Execute, VerdictAlone]
    config.Autograde.autograde_preprocessors = [*steps[:place], *around, *steps[place + 1 :]]
    for path in files("alembic") or []:
        if path.stem == "alembic" and path.suffix in ("", ".exe"):
            folder = Path(str(path.locate())).resolve().parent
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def make_course(folder: Path, names: list[str], root: Path | None = None) -> list[str]:
    """Fills a new or empty folder with a course: an assignment for each lesson; their names.

    source/ has the solutions, release/ the lessons as they are handed out, and the gradebook knows
    both. What nbgrader itself would release, without outputs, is in a folder of its own.
    """
    root = find_clone(root)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ReleaseError(f"{folder} is not empty: name a new or an empty folder.")
    lessons = sorted((root / "lessons").glob("*.ipynb"))
    chosen = [path for path in lessons if not names or path.name.startswith(tuple(names))]
    if not chosen or len({p.name[:2] for p in chosen}) < len(set(names)):
        raise ReleaseError(f"Not every one of {', '.join(names)} begins a lesson's name.")
    for lesson in chosen:
        for room, source in (("source", root / "solutions" / lesson.name), ("release", lesson)):
            (folder / room / lesson.stem).mkdir(parents=True)
            shutil.copy(source, folder / room / lesson.stem)
    (folder / "nbgrader_config.py").write_text(CONFIG)
    config = Config()
    configure(config)
    config.CourseDirectory.root = str(folder.resolve())
    config.CourseDirectory.release_directory = ".generated"
    api = NbGraderAPI(config=config)
    for lesson in chosen:
        done = api.generate_assignment(lesson.stem, force=True)  # without force: skipped, silently
        if not done["success"]:
            last = (done.get("error") or done.get("log") or "").strip().splitlines()[-1:]
            raise ReleaseError(f"nbgrader does not take {lesson.name}: {' '.join(last)}")
    return [lesson.stem for lesson in chosen]


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence where there can be no course."""
    parser = argparse.ArgumentParser(prog="python -m zerolab.course.nbgrader_course")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    parser.add_argument("lessons", nargs="*", help="beginnings of their names; none means all")
    args = parser.parse_args(argv)
    try:
        names = make_course(args.folder, args.lessons)
    except ReleaseError as error:
        print(f"nbgrader_course: {error}", file=sys.stderr)
        return 2
    print(f"{args.folder}: {len(names)} assignments. Hand out what is in release/; put what comes")
    print(f"back into submitted/<student>/{names[0]}/, and call nbgrader autograde there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
