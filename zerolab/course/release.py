"""What an instructor hands out: the lessons and the package, without solutions and tests.

It leaves out files, and hides nothing: who wants the answers finds them in the public repository.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from zerolab.course.derive import DeriveError, check

# Copied as they are, those of them that a clone has.
WHOLE = ("pyproject.toml", "constraints.txt", "environment.yml", "LICENSE", ".gitignore")
# For instructors alone: they read solutions, or hold answers that are nearly right.
WITHHELD = re.compile(r"zerolab/course/(pretend\w*|nbgrader_course)\.py$")
# Of the Makefile, the paragraphs that begin with one of these; of the README, all but these parts.
RULES = ("PYTHON ?=", "VENV :=", "lab:", "clean:", "$(VENV)/lab.ready", "# Makes", "# A ready file")
NOT_FOR_LEARNERS = ("Teach with it", "How it is built")
INSTRUCTORS = ("| `zerolab release", "| `zerolab grade")  # their rows in the table of commands
ABSENT = re.compile(r"solutions/|tests/|docs/|CONTRIBUTING|make (test|site|lessons)\b")
NO_CLONE = (
    "There is no clone of the course {where}: call zerolab release inside a clone, which has "
    "lessons/ and solutions/; an installed package has neither."
)


class ReleaseError(Exception):
    """Why nothing was released, in one sentence."""


def find_clone(start: Path | None = None) -> Path:
    """The clone of the course: the folder given, or the current one, or that of this package."""
    for root in [start] if start else [Path.cwd(), Path(__file__).parents[2]]:
        here = (root / "pyproject.toml", root / "zerolab" / "course", root / "lessons")
        if all(path.exists() for path in here) and any((root / "solutions").glob("*.ipynb")):
            return root.resolve()
    raise ReleaseError(NO_CLONE.format(where=f"in {start}" if start else "here"))


def release(target: Path, root: Path | None = None) -> list[str]:
    """Fills a new or empty folder; the names of its files, in order. ReleaseError says why not.

    All is read and examined before anything is written.
    """
    root = find_clone(root)
    if target.exists() and not target.is_dir():
        raise ReleaseError(f"{target} is a file: name a new or an empty folder.")
    if target.is_dir() and any(target.iterdir()):
        raise ReleaseError(f"{target} is not empty: name a new or an empty folder.")
    inside = target.resolve()
    for room in ("lessons", "solutions", "zerolab"):
        if inside.is_relative_to(root / room):
            raise ReleaseError(f"{target} lies in {room}/ of the clone: name one outside of it.")
    files = contents(root)
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return sorted(files)


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a release: its name, with slashes, and its bytes."""
    paths = [root / name for name in WHOLE if (root / name).exists()]
    paths += sorted((root / "zerolab").rglob("*.py"))
    lessons = sorted((root / "lessons").glob("*.ipynb"))
    for lesson in lessons:
        _expect_unsolved(root / "solutions" / lesson.name, lesson)
    files = {
        name: path.read_bytes()
        for path in [*paths, *lessons]
        if not WITHHELD.match(name := path.relative_to(root).as_posix())
    }
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    readme = (root / "README.md").read_text(encoding="utf-8")
    files["Makefile"] = makefile_for_learners(makefile).encode()
    files["README.md"] = readme_for_learners(readme).encode()
    return files


def _expect_unsolved(solution: Path, lesson: Path) -> None:
    """The lesson is the one that its solution gives: nobody has written answers into it."""
    if not solution.exists():
        raise ReleaseError(f"lessons/{lesson.name} has no solution to compare with: move it away.")
    try:
        check(solution, lesson)
    except DeriveError as error:
        raise ReleaseError(f"{error}") from None
    for cell in nbformat.read(lesson, 4).cells:
        if "### BEGIN" in cell.source or "solution-only" in cell.metadata.get("tags", []):
            raise ReleaseError(f"lessons/{lesson.name} holds a solution, in cell {cell.id}.")


def makefile_for_learners(text: str) -> str:
    """The rules that `make lab` and `make clean` need."""
    head = (
        "# make lab      open the course in JupyterLab; the first time this sets up .venv\n"
        "# make clean    remove what make made, .venv too; notebooks stay\n\n"
        ".PHONY: lab clean"
    )
    text = re.sub(r"^NBVAL.*\n", "", text, flags=re.MULTILINE)
    kept = [part.strip("\n") for part in text.split("\n\n") if part.lstrip().startswith(RULES)]
    return "\n\n".join([head, *kept]).replace("find zerolab tests", "find zerolab") + "\n"


def readme_for_learners(text: str) -> str:
    """Without parts, lines and sentences that speak of what a release does not have."""
    text = re.sub(r" \(`tests/[^)]*\)", "", text).replace(
        "a clone of this repository", "this folder"
    )
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    sections = [s for s in sections if not s.startswith(tuple(f"## {n}" for n in NOT_FOR_LEARNERS))]
    lines = []
    for line in "".join([first, *sections]).split("\n"):
        if (line.startswith("make ") and ABSENT.search(line)) or line.startswith(INSTRUCTORS):
            continue
        sentences = re.split(r"(?<=[.:]) (?=[A-Z`(])", line)
        lines.append(" ".join(s for s in sentences if not ABSENT.search(s)))
    return "\n".join(lines)
