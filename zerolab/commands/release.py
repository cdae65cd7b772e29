"""zerolab release: what an instructor hands out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_release(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "release",
        help="copy what learners get: lessons and package, without solutions and tests",
        description="Fills a new or empty folder, in which `make lab` works. The public repository "
        "still has every solution.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    parser.set_defaults(run=_release)


def _release(arguments: argparse.Namespace) -> int:
    from zerolab.course.release import ReleaseError, release

    try:
        names = release(arguments.folder)
    except ReleaseError as error:
        raise ValueError(str(error)) from None
    lessons = sum(name.endswith(".ipynb") for name in names)
    print(f"{arguments.folder}: {lessons} lessons, {len(names)} files, no solutions.")
    print(f"Try it as a learner will: cd {arguments.folder} && make lab")
    return 0
