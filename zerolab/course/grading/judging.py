"""The grader's side: a learner's notebook at work in its sandboxes, and the verdicts on it.

No code of a learner's runs in this process, and nothing that came from one is unpickled in it.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from zerolab.course.checks import EXERCISES, given
from zerolab.course.checks.core import LIMIT_S, Aborted, Elsewhere, Verdict, judged, untimed
from zerolab.course.checks.on_ranks import send_checks_by_value
from zerolab.course.grading import codec
from zerolab.course.grading.channel import Garbled
from zerolab.course.grading.ranks import Learners
from zerolab.course.grading.sandbox import PATIENCE, Box, Died, Limits, TooLate
from zerolab.course.kept import START_S, TIMEOUT_S, given_patience, patience
from zerolab.practice.world import RankError, RankTimeout

CELL_S = 15.0  # for one cell of a learner's, of processor time
NOTEBOOK_S = 45.0  # for all of a notebook, with its trials; the course's own need at most 12
TRIAL_S = START_S + 3 * TIMEOUT_S


class Failed(Exception):
    """What a learner's cell or expression raised: type and text."""


class Gone(Aborted):
    """The sandbox is no more: what ended it, in words."""


@dataclass
class Clock:
    """Seconds that are left to a notebook, however often it starts; waiting costs a part."""

    left_s: float = field(default_factory=lambda: NOTEBOOK_S * given_patience())


class Notebook:
    """One learner's notebook at work. Raises Gone from anything after which it must start anew."""

    def __init__(self, learner: str, limits: Limits, clock: Clock | None = None) -> None:
        self.learner, self.limits, self.clock = learner, limits, clock or Clock()
        self.environment = {"ZEROLAB_LEARNER": learner}
        self._ranks: Box | None = None
        self._left_s = 0.0  # for the calls of one verdict, all together
        self._fresh = True  # the next trial meets no rank that an earlier answer met
        self._cells = Box("cells", limits, self.environment)
        numbers = {k: vars(given(k, learner)) for k, task in EXERCISES.items() if task.choices}
        self._ask({"do": "begin", "given": numbers}, within_s=START_S)

    def run(self, source: str) -> None:
        """Runs a cell. Raises Failed for what it raised."""
        try:
            self._ask({"do": "run", "source": source}, within_s=CELL_S)
        finally:
            if (many := self._cells.processes()) > self.limits.processes // 2:
                raise Gone(f"it left {many} processes behind")

    def verdict(self, number: str, expression: str) -> Verdict:
        """Judges what the expression is now, as an answer to the exercise."""
        header, blobs = self._ask({"do": "answer", "source": expression}, within_s=CELL_S)
        self._left_s, self._fresh = LIMIT_S, True
        return judged(number, self._read(header, blobs), self.learner)

    def call(
        self, function: int, args: Sequence[Any], named: dict[str, Any], withheld: Sequence[str]
    ) -> Any:
        """What a learner's function returns; what it raises is raised."""
        writer = codec.Writer(_remote_number)
        request = {
            "do": "call", "function": function, "args": writer.write(list(args)),
            "named": writer.write(named), "memory": None, "withheld": list(withheld),
        }  # fmt: skip
        request["memory"] = writer.memory()
        began = self._cells.cpu_s
        with untimed():  # else the judge's own clock would strike while an answer is on its way
            header, blobs = self._ask(request, writer.blobs, within_s=max(0.1, self._left_s))
        self._left_s -= max(0.0, self._cells.cpu_s - began)
        return self._read(header, blobs, writer.storages)

    def run_on_ranks(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        ranks: list[int] | None,
        size: int,
        ready: Callable[[], None] | None,
    ) -> list[Any]:
        """As `World.run`, on ranks in a sandbox."""
        exported: dict[int, int] = {}
        functions: list[bytes] = []

        def place(value: Any) -> Any:
            if isinstance(value, RemoteFunction):
                if value.number not in exported:
                    exported[value.number] = len(functions)
                    functions.append(self._export(value.number))
                return Learners(exported[value.number])
            if isinstance(value, list | tuple):
                return type(value)(place(one) for one in value)
            return value

        placed = place(tuple(args))
        send_checks_by_value()
        blobs = [cloudpickle.dumps((function, placed)), cloudpickle.dumps(ready), *functions]
        self._ranks = self._ranks or Box("ranks", self.limits, self.environment)
        request = {"size": size, "ranks": ranks, "fresh": self._fresh}
        self._fresh = False
        header, back = self._ask(request, blobs, within_s=TRIAL_S * patience(), box=self._ranks)
        results, start = [], 0
        for text, count in zip(header["value"], header["blobs"], strict=True):
            written, memory = json.loads(text)
            with _sound():
                mine = back[start : start + count]
                results.append(codec.Reader(mine, memory, _no_function).read(written))
            start += count
        return results

    def _export(self, function: int) -> bytes:
        try:
            return self._ask({"do": "export", "function": function}, within_s=CELL_S)[1][0]
        except Failed as error:
            raise RuntimeError(f"it cannot be sent to the ranks: {error}") from None

    def _read(self, header: Any, blobs: list[bytes], known: list[Any] | None = None) -> Any:
        def function(number: int, name: str) -> RemoteFunction:
            return RemoteFunction(self, number, name)

        with _sound():
            return codec.Reader(blobs, header["memory"], function, known).read(header["value"])

    def _ask(
        self, request: Any, blobs: list[bytes] | None = None, *, within_s: float,
        box: Box | None = None,
    ) -> tuple[Any, list[bytes]]:  # fmt: skip
        asked, began = box or self._cells, time.monotonic()
        used = asked.cpu_s
        try:
            header, back = asked.ask(request, blobs, min(within_s, self.clock.left_s))
        except TooLate:
            if self.clock.left_s < within_s:
                raise Gone(f"the notebook used up all its {Clock().left_s:.0f} seconds") from None
            limit_s = LIMIT_S if request.get("do") == "call" else within_s
            raise Gone(f"it did not end within {limit_s:.0f} seconds") from None
        except Died as error:
            raise Gone(str(error)) from None
        except Garbled as error:
            raise Gone(f"its answer is {error}") from None
        finally:
            waited = (time.monotonic() - began) / PATIENCE
            self.clock.left_s -= max(asked.cpu_s - used, waited)
        if isinstance(header, dict) and "raised" in header:
            _raise(header["raised"], request.get("do", "ranks"))
        return header, back

    def close(self) -> None:
        for box in (self._cells, self._ranks):
            if box:
                box.close()

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteFunction(Elsewhere):
    """A function of the learner's, in the notebook's sandbox."""

    def __init__(
        self, notebook: Notebook, number: int, name: str, withheld: Sequence[str] = ()
    ) -> None:
        self.notebook, self.number, self.__name__ = notebook, number, name
        self.withheld = withheld

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.notebook.call(self.number, args, named, self.withheld)

    def without(self, names: Sequence[str]) -> RemoteFunction:
        return RemoteFunction(self.notebook, self.number, self.__name__, names)

    def run_on_ranks(self, *args: Any) -> list[Any]:
        return self.notebook.run_on_ranks(*args)

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"


def _remote_number(value: Any) -> int | None:
    if isinstance(value, RemoteFunction):
        return value.number
    if callable(value) and type(value).__module__ == "builtins":
        raise TypeError(f"a judge hands the function {value!r} to a learner's function")
    return None


def _no_function(number: int, name: str) -> Any:
    return codec.Odd()


@contextlib.contextmanager
def _sound() -> Iterator[None]:
    try:
        yield
    except (Garbled, KeyError, TypeError, IndexError) as error:
        raise Gone(f"its answer is {error}") from None


def _raise(raised: Any, during: str) -> None:
    """Raises here what was raised there."""
    kind, text = str(raised.get("type")), str(raised.get("text"))
    where = str(raised.get("where") or "")
    if during == "ranks":
        if kind == "RankTimeout":
            raise RankTimeout(text, where=where)
        raise RankError(text, where=where)
    if during != "call":
        raise Failed(f"{kind}: {text}" + (f", in {where}" if where else ""))
    known = getattr(builtins, kind, None)
    proper = isinstance(known, type) and issubclass(known, Exception)
    try:
        error: Exception = known(text) if proper else RuntimeError(f"{kind}: {text}")  # type: ignore
    except Exception:  # some take more than a text
        error = RuntimeError(f"{kind}: {text}")
    error.learners_line = where  # type: ignore[attr-defined]
    raise error
