"""Derive lessons/*.ipynb from solutions/*.ipynb, and run both so that their outputs are real.

    python -m zerolab.course.derive               derive and run all
    python -m zerolab.course.derive 05 06 -j 2    only these, two at a time
    python -m zerolab.course.derive --check       run nothing; fail if lessons are out of step

The solution is the only hand-written source. The markers are nbgrader's own, each alone on a line:

    ### BEGIN SOLUTION ... ### END SOLUTION           becomes one stub line, indentation kept
    ### BEGIN HIDDEN TESTS ... ### END HIDDEN TESTS   is removed
    a cell with the tag "solution-only"               is removed

Deriving twice gives the same bytes: no times, no versions, no widget state are stored.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from zerolab.course.progress import VARIABLE

STUB = {"code": 'raise NotImplementedError("your code here")', "markdown": "*Your answer here.*"}
MARKER = re.compile(r"^(?P<indent>\s*)### (?P<end>BEGIN|END) (?P<kind>SOLUTION|HIDDEN TESTS)\s*$")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# What differs from machine to machine and so must not be stored.
LOCAL = {
    "an absolute path": re.compile(
        r"(?<![\w.:/~-])/(?:home|root|tmp|usr|opt|var|mnt|srv|work|workspace|private|Users)/\S*"
        r"|\b[A-Z]:\\\w\S*"
    ),
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{6,}"),
    "a process id": re.compile(r"\bpid\W{0,2}\d+", re.IGNORECASE),
}
GetMsg = Callable[..., Awaitable[Any]]


class DeriveError(Exception):
    """What is wrong with a notebook, in one sentence that names it."""


def where(path: Path, index: int, cell: Any) -> str:
    """How every message names a cell: counted from 1, as a reader would."""
    return f"{path.parent.name}/{path.name}, cell {index + 1} (id {cell.get('id')})"


def read(path: Path) -> Any:
    """A notebook as it lies on disk; nbformat.read would silently repair missing or doubled ids."""
    try:
        nb = nbformat.v4.reads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DeriveError(f"{path.parent.name}/{path.name} is no notebook: {error}.") from None
    ids = Counter(cell.get("id") for cell in nb.cells)
    for index, cell in enumerate(nb.cells):
        if not cell.get("id") or ids[cell.id] > 1:
            problem = "shares its id with another cell" if cell.get("id") else "has no id"
            raise DeriveError(f"{where(path, index, cell)} {problem}.")
    return nb


def strip_source(source: str, stub: str) -> str:
    """Replace solutions by the stub and remove hidden tests; ValueError if a marker has no pair."""
    kept: list[str] = []
    inside: str | None = None
    for line in source.split("\n"):
        marker = MARKER.match(line)
        if marker is None:
            if "### BEGIN" in line or "### END" in line:
                raise ValueError(f"has a marker that is none of ours: {line.strip()!r}")
            if inside is None:
                kept.append(line)
        elif marker["end"] == "BEGIN":
            if inside:
                raise ValueError(f"has BEGIN {marker['kind']} inside of {inside}")
            inside = marker["kind"]
            if inside == "SOLUTION":
                kept.append(marker["indent"] + stub)
        elif inside != marker["kind"]:
            raise ValueError(f"has END {marker['kind']} without its BEGIN")
        else:
            inside = None
    if inside:
        raise ValueError(f"has BEGIN {inside} without its END")
    return "\n".join(kept).rstrip("\n")


def cleaned(nb: Any) -> Any:
    """The notebook without what a run adds: widget state, times, versions, chunks of a stream."""
    nb = copy.deepcopy(nb)
    extra = {k: v for k, v in nb.metadata.items() if k not in ("widgets", *METADATA)}
    nb.metadata = nbformat.from_dict({**METADATA, **extra})
    nb.nbformat, nb.nbformat_minor = 4, 5
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = list(joined_streams(cell.outputs))
            for output in cell.outputs:
                # No kernel holds the widget any more: without it the still figure is what is shown.
                output.get("data", {}).pop(WIDGET_VIEW, None)
                if output.output_type == "error":  # frames of libraries carry this machine's paths
                    frames = output.traceback
                    output.traceback = [
                        f for f in frames if not ANSI.sub("", f).startswith("File ")
                    ]
    return nb


def joined_streams(outputs: list[Any]) -> Iterator[Any]:
    """Neighbouring pieces of one stream as one: where a kernel cuts it depends on timing."""
    last = None
    for output in outputs:
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            yield output
            last = output


def without_outputs(nb: Any) -> Any:
    """What a person wrote, and nothing that a run added."""
    nb = cleaned(nb)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def derive(solution: Any, path: Path) -> Any:
    """The lesson that belongs to a solution, not yet run."""
    lesson = without_outputs(solution)
    for index, cell in enumerate(lesson.cells):
        try:
            cell.source = strip_source(cell.source, STUB.get(cell.cell_type, ""))
        except ValueError as error:
            raise DeriveError(f"{where(path, index, cell)} {error}.") from None
    lesson.cells = [c for c in lesson.cells if "solution-only" not in c.metadata.get("tags", [])]
    return lesson


def text_of(output: Any) -> Iterator[str]:
    """All that a reader sees of an output as text."""
    yield output.get("text", "")
    yield output.get("evalue", "")
    yield from output.get("traceback", [])
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield value


def refuse_local_outputs(nb: Any, path: Path) -> None:
    """Stored outputs must be the same on every machine."""
    for index, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            for text in text_of(output):
                for what, pattern in LOCAL.items():
                    if found := pattern.search(ANSI.sub("", text)):
                        raise DeriveError(f"{where(path, index, cell)} stores {what}: {found[0]}")


def looking_often(get_msg: GetMsg, every_s: float = 0.2) -> GetMsg:
    """As a channel's `get_msg`, and looks again and again whether one is there.

    Widgets that capture output have nbclient send on the channel on which it waits for a cell's
    reply. A reply that comes in that moment wakes nobody: it would be seen when the time is up.
    """

    async def get(timeout: float | None = None) -> Any:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return await get_msg(timeout=max(0.0, min(every_s, until - time.monotonic())))
            except Empty:
                if time.monotonic() >= until:
                    raise

    return get


class Client(NotebookClient):
    """nbclient's, which misses no reply."""

    async def async_start_new_kernel_client(self) -> Any:
        client = await super().async_start_new_kernel_client()
        client.shell_channel.get_msg = looking_often(client.shell_channel.get_msg)
        return client


def run(nb: Any, path: Path, timeout_s: int = 600) -> Any:
    """Run a notebook in its own folder, as JupyterLab would; return it cleaned, with outputs."""
    nb = copy.deepcopy(nb)
    reached = 0

    def note(cell: Any, cell_index: int) -> None:
        nonlocal reached
        reached = cell_index

    client = Client(
        nb,
        timeout=timeout_s,
        iopub_timeout=60,  # s, not 4: what a cell prints comes late on a busy machine
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=note,
    )
    # With this variable set, ipykernel does not capture what child processes print.
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    env[VARIABLE] = "off"  # a learner's own progress is not ours to write
    try:
        client.execute(env=env)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        reason = (ANSI.sub("", str(error)).strip() or "the kernel died").splitlines()[-1]
        raise DeriveError(f"{where(path, reached, nb.cells[reached])} failed: {reason}") from None
    nb = cleaned(nb)
    refuse_local_outputs(nb, path)
    return nb


def write(nb: Any, path: Path) -> None:
    """Write in one go, so that an interruption leaves the old notebook or the new one."""
    nbformat.validate(nb)
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".ipynb.part")
    draft.write_text(nbformat.writes(nb, version=nbformat.NO_CONVERT) + "\n", encoding="utf-8")
    draft.replace(path)


def build(solution_path: Path, lesson_path: Path) -> None:
    """Run one solution in place, derive its lesson, run that too."""
    solution = read(solution_path)
    lesson = derive(solution, solution_path)  # first: a wrong marker should cost no run
    write(run(without_outputs(solution), solution_path), solution_path)
    lesson_path.parent.mkdir(exist_ok=True)
    write(run(lesson, lesson_path), lesson_path)


def check(solution_path: Path, lesson_path: Path) -> None:
    """Raise DeriveError unless the lesson on disk is the one that the solution gives."""
    solution = read(solution_path)
    want = derive(solution, solution_path)
    refuse_local_outputs(solution, solution_path)
    name = f"lessons/{lesson_path.name}"
    if not lesson_path.exists():
        raise DeriveError(f"{name} is missing; `make lessons` derives it.")
    lesson = read(lesson_path)
    refuse_local_outputs(lesson, lesson_path)
    have = without_outputs(lesson)
    if len(have.cells) != len(want.cells):
        raise DeriveError(
            f"{name} is out of step: it has {len(have.cells)} cells, its solution gives "
            f"{len(want.cells)}; `make lessons` derives it."
        )
    for index, (cell, wanted) in enumerate(zip(have.cells, want.cells, strict=True)):
        for key in sorted({*cell, *wanted}):
            if cell.get(key) != wanted.get(key):
                raise DeriveError(
                    f"{where(lesson_path, index, cell)} is out of step with its solution "
                    f"in its {key}; `make lessons` derives it."
                )
    if have.metadata != want.metadata:
        raise DeriveError(f"{name} is out of step in its metadata; `make lessons` derives it.")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 if all is well; else 1, and one sentence for each notebook that is not."""
    parser = argparse.ArgumentParser(prog="python -m zerolab.course.derive")
    parser.add_argument("names", nargs="*", help="beginnings of notebook names; none means all")
    parser.add_argument("--check", action="store_true", help="run nothing, only compare")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="notebooks at a time")
    parser.add_argument("--root", type=Path, default=Path(), help="folder that holds solutions/")
    args = parser.parse_args(argv)
    lessons = args.root.resolve() / "lessons"
    solutions = sorted((args.root.resolve() / "solutions").glob("*.ipynb"))
    chosen = [s for s in solutions if not args.names or s.name.startswith(tuple(args.names))]
    problems = [
        f"No solution's name begins with {name}."
        for name in args.names
        if not any(s.name.startswith(name) for s in solutions)
    ]
    if not args.names:
        stray = {path.name for path in lessons.glob("*.ipynb")} - {s.name for s in solutions}
        problems += [f"lessons/{name} has no solution to derive it from." for name in sorted(stray)]

    def one(solution_path: Path) -> str | None:
        try:
            (check if args.check else build)(solution_path, lessons / solution_path.name)
        except DeriveError as error:
            return str(error)
        if not args.check:
            print(f"{solution_path.name}: derived, both ran", flush=True)
        return None

    with ThreadPoolExecutor(1 if args.check else max(1, args.j)) as pool:
        problems += [problem for problem in pool.map(one, chosen) if problem]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(chosen)} lessons {'in step' if args.check else 'derived'}.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
