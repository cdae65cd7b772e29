"""What of a submitted notebook is run, in which order, and what is judged.

The release decides: its locked cells run as they were released, whatever the submission made of
them, and of those only the statements that a learner's cells need. The learner's cells are found by
the release's names for them, or else by the function that they define.
"""

from __future__ import annotations

import ast
import json
import re
import stat
import symtable
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_BYTES = 50 * 2**20  # of a notebook file
MOST_CODE = 2**20  # characters in its code cells
MOST_CELLS = 1000
STUB = 'raise NotImplementedError("your code here")'


# Words that no answer needs, and that somebody should look at: with them code finds what judges it.
REMARKABLE = {
    "_getframe", "_current_frames", "currentframe", "f_back", "f_globals", "f_locals", "tb_frame",
    "__globals__", "__closure__", "__code__", "__subclasses__", "get_objects", "get_referrers",
    "settrace", "setprofile", "addaudithook", "ctypes", "importlib", "mock", "exec", "eval",
    "__torch_dispatch__", "TorchDispatchMode", "Stage0", "Stage1", "Stage2", "Stage3",
    "PATIENTS", "run_fault",
}  # fmt: skip


class Unreadable(ValueError):
    """Why a submission cannot be graded, in one sentence."""


def plain(text: str, most: int = 2000) -> str:
    """A learner's text for tables, pages and terminals: what moves a cursor is shown as a code."""
    text = text if len(text) <= most else text[:most] + " …"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Cell:
    """A code cell; `name` is nbgrader's grade_id or the cell's own id."""

    name: str
    source: str
    answer: bool = False  # the learner's to fill in

    @property
    def defines(self) -> set[str]:
        """The functions and variables that it makes; none where it cannot be parsed."""
        return set().union(*(_made(s) for s in _statements(self.source)))


@dataclass(frozen=True)
class Judge:
    """Judge the value of `expression` as the answer to the exercise; its cell is `cell`."""

    exercise: str
    expression: str
    cell: str


@dataclass(frozen=True)
class Run:
    """Run this source. `locked` is the release's own text."""

    cell: str
    source: str
    locked: bool = False


@dataclass
class Plan:
    """What to run and judge, in order; `missing` names exercises whose cells are not there."""

    steps: list[Run | Judge] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lesson:
    """A released notebook: its code cells in order, and what each check judges."""

    name: str  # 05_stage_1
    cells: tuple[Cell, ...]
    checks: dict[str, tuple[str, str]]  # cell name -> exercise, expression

    @classmethod
    def load(cls, path: Path) -> Lesson:
        """ValueError where a check cell is not one call of check."""
        cells = tuple(code_cells(read(path.resolve())))
        checks = {c.name: _checked(c) for c in cells if c.source.startswith("check(")}
        return cls(path.stem, cells, checks)

    @property
    def exercises(self) -> list[str]:
        return [exercise for exercise, _ in self.checks.values()]


def _checked(cell: Cell) -> tuple[str, str]:
    match ast.parse(cell.source).body:
        case [
            ast.Expr(ast.Call(func=ast.Name("check"), args=[ast.Constant(str(number)), what, *_]))
        ]:
            return number, ast.unparse(what)
    raise ValueError(f"the cell {cell.name} of the release is not check(number, answer)")


def contents(path: Path) -> bytes:
    """A handed-in file's bytes. Raises Unreadable for what is no file of a sound size.

    A link might lead to the solutions or to somebody else's work, and a pipe never ends.
    """
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            raise Unreadable("it is a link: hand in the notebook itself")
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("it is no file: hand in the notebook itself")
        if about.st_size > MOST_BYTES:
            megabytes = about.st_size / 1e6
            raise Unreadable(f"it has {megabytes:.0f} MB: clear its outputs and hand it in again")
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None


def read(path: Path) -> dict[str, Any]:
    """A notebook's JSON. Raises Unreadable where it is none of ours to run."""
    try:
        nb = json.loads(contents(path))
    except Unreadable:
        raise
    except (ValueError, RecursionError):
        raise Unreadable("it is not JSON: save it in JupyterLab and hand it in again") from None
    if not isinstance(nb, dict) or not isinstance(nb.get("cells"), list):
        raise Unreadable("it has no cells: it is not a notebook of format 4")
    about = nb.get("metadata") if isinstance(nb.get("metadata"), dict) else {}
    for place, name in (("kernelspec", "language"), ("language_info", "name")):
        language = _get(about, place, name)
        if isinstance(language, str) and language.lower() not in ("", "python", "ipython"):
            raise Unreadable(f"its kernel runs {language}: open it with a Python kernel")
    return nb


def _get(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def code_cells(nb: dict[str, Any]) -> Iterable[Cell]:
    """The code cells of a notebook's JSON, whatever is odd about the others."""
    for place, cell in enumerate(nb["cells"]):
        if _get(cell, "cell_type") != "code":
            continue
        source = cell.get("source")
        if isinstance(source, list):
            source = "".join(map(str, source))
        name = _get(cell, "metadata", "nbgrader", "grade_id") or cell.get("id") or f"cell-{place}"
        answer = bool(_get(cell, "metadata", "nbgrader", "solution"))
        yield Cell(plain(str(name), 80), str(source or ""), answer)


def plan(lesson: Lesson, submitted: dict[str, Any]) -> Plan:
    """What to do with a submission. Raises Unreadable where it has none of the lesson's cells."""
    theirs, made = list(code_cells(submitted)), Plan()
    if sum(len(cell.source) for cell in theirs) > MOST_CODE or len(theirs) > MOST_CELLS:
        raise Unreadable("it has more code than a lesson asks for: take out what was generated")
    found = {c.name: _find(c, theirs, lesson, made) for c in lesson.cells if c.answer}
    if not any(found.values()):
        raise Unreadable(
            f"none of the exercises of {lesson.name} is in it: is it another notebook?"
        )
    own = _own_cells(lesson, theirs, {id(cell) for cell in found.values()})
    place = {c.name: number for number, c in enumerate(lesson.cells)}
    order = [place[name] for name in dict.fromkeys(c.name for c in theirs) if name in place]
    if sorted(order) != order:
        made.notes.append("its cells are in another order; they were run in the lesson's")
    steps: list[Run | Judge] = [Run(c.name, c.source) for c in own.get("", [])]
    waiting: list[str] = []  # answer cells since the last check
    for cell in lesson.cells:
        mine = found.get(cell.name)
        if cell.answer:
            waiting.append(cell.name)
            if mine:
                steps.append(Run(cell.name, mine.source))
        elif cell.name in lesson.checks:
            exercise, expression = lesson.checks[cell.name]
            if absent := [name for name in waiting if not found[name]]:
                made.missing[exercise] = f"its cell ({absent[0]}) is not in the notebook"
            else:
                steps.append(Judge(exercise, expression, waiting[-1] if waiting else ""))
            waiting = []
        else:
            steps.append(Run(cell.name, cell.source, locked=True))
        steps.extend(Run(c.name, c.source) for c in own.get(cell.name, []))
    made.steps = list(_lean(steps))
    for step in made.steps:
        if isinstance(step, Run) and not step.locked and (words := _remarkable(step.source)):
            made.notes.append(f"{step.cell} names {', '.join(words)}: read it")
    return made


def _remarkable(source: str) -> list[str]:
    """The words of a cell that somebody should look at; who wants to hide one can."""
    found = set(re.findall(r"\w+", source))
    return sorted(found & REMARKABLE)


def _find(cell: Cell, theirs: list[Cell], lesson: Lesson, made: Plan) -> Cell | None:
    """The submission's cell for a cell of the release that is the learner's to fill in."""
    candidates = [c for c in theirs if c.name == cell.name]
    if not candidates:  # pasted into a new cell, or renamed
        released = {c.name for c in lesson.cells}
        functions = {
            s.name for s in _statements(cell.source) if isinstance(s, ast.FunctionDef)
        }  # fmt: skip
        candidates = [
            c for c in theirs if c.name not in released and functions and functions <= c.defines
        ]
    filled = [c for c in candidates if STUB not in c.source]
    if len(candidates) > 1:
        times = f"{cell.name} is there {len(candidates)} times"
        made.notes.append(f"{times}; the last that is filled in counts")
    return next(reversed(filled or candidates), None)


def _own_cells(lesson: Lesson, theirs: list[Cell], taken: set[int]) -> dict[str, list[Cell]]:
    """The learner's further cells, by the release's cell that they follow ("" for none)."""
    released = {cell.name for cell in lesson.cells}
    own: dict[str, list[Cell]] = {}
    after = ""
    for cell in theirs:
        if cell.name in released:
            after = cell.name
        elif id(cell) not in taken and cell.source.strip():
            own.setdefault(after, []).append(cell)
    return own


# ---- of the locked cells, what is needed


def _lean(steps: list[Run | Judge]) -> Iterable[Run | Judge]:
    """The steps, with each locked cell cut down to the statements that something later needs."""
    needed: set[str] = set()
    kept: list[Run | Judge] = []
    for step in reversed(steps):
        if isinstance(step, Judge):
            needed |= _used(ast.parse(step.expression, mode="eval"))
            kept.append(step)
        elif not step.locked:
            for statement in _statements(step.source):
                needed |= _used(statement)
            kept.append(step)
        else:
            lines: list[str] = []
            for statement in reversed(list(_statements(step.source))):
                if _made(statement) & needed:
                    needed |= _used(statement)
                    lines.append(ast.unparse(statement))
            if lines:
                kept.append(Run(step.cell, "\n".join(reversed(lines)), locked=True))
    return reversed(kept)


# What is no Python or too deep; what parses may still be none (two parameters of one name).
_NO_PROGRAM = (SyntaxError, ValueError, RecursionError, MemoryError)


def _statements(source: str) -> list[ast.stmt]:
    """The statements of a cell; of one with magics or errors, what its plain lines are."""
    try:
        return ast.parse(source).body
    except _NO_PROGRAM:
        lines = [line for line in source.split("\n") if not line.startswith(("%", "!"))]
    try:
        return ast.parse("\n".join(lines)).body
    except _NO_PROGRAM:
        return []


def _table(node: ast.AST) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(node), "cell", "exec")


def _used(node: ast.AST) -> set[str]:
    """The variables of the notebook that it reads; a function's own names are not among them."""
    names: set[str] = set()
    try:
        tables = [_table(node)]
    except _NO_PROGRAM:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outermost = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (outermost or symbol.is_global()):
                names.add(symbol.get_name())
    return names


def _made(statement: ast.stmt) -> set[str]:
    """The notebook's variables that it binds, or whose objects it writes into."""
    try:
        symbols = _table(statement).get_symbols()
    except _NO_PROGRAM:
        return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    names = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                names |= _used(ast.Expr(node.value))
    return names
