"""Runs a notebook's cells in a sandbox, and answers for what they made: `python -m … .cells`.

Requests: `begin` (the learner's numbers), `run` (a cell), `answer` (an expression over the cells'
variables), `call` (a function that an answer held), `export` (that function, for ranks).
"""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from types import SimpleNamespace
from typing import Any

import cloudpickle
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from zerolab.course.grading import channel, codec
from zerolab.course.withheld import withheld


class Cells:
    """A notebook at work."""

    def __init__(self) -> None:
        HistoryManager.enabled = False  # type: ignore[assignment]
        self.functions: list[Any] = []
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module  # functions of cells travel to ranks by value
        self.shell = InteractiveShell.instance(user_module=module, colors="NoColor")
        self.shell.showtraceback = lambda *_, **__: None  # type: ignore[method-assign]

    def __call__(self, request: Any, blobs: list[bytes]) -> channel.Answer:
        return getattr(self, f"_{request['do']}")(request, blobs)

    def _begin(self, request: Any, _: list[bytes]) -> channel.Answer:
        """The package's checks are not in here; a notebook may call them all the same."""
        numbers = {k: SimpleNamespace(**v) for k, v in request["given"].items()}
        checks = types.ModuleType("zerolab.course.checks")
        checks.__dict__.update(
            check=lambda *_, **__: 0.0,
            given=lambda number, *_, **__: numbers[number],
            hint=lambda *_, **__: "",
            EXERCISES={},
        )
        sys.modules["zerolab.course.checks"] = checks
        return {"begun": True}, []

    def _run(self, request: Any, _: list[bytes]) -> channel.Answer:
        try:
            ran = self.shell.run_cell(request["source"], store_history=False)
        except BaseException as error:
            return channel.said(error), []
        if stopped := ran.error_before_exec or ran.error_in_exec:
            return channel.said(stopped, _line(stopped)), []
        return {"value": None}, []

    def _answer(self, request: Any, _: list[bytes]) -> channel.Answer:
        try:
            value = eval(request["source"], self.shell.user_ns)
        except BaseException as error:
            return channel.said(error), []
        return self._written(value, codec.Writer(self._number))

    def _call(self, request: Any, blobs: list[bytes]) -> channel.Answer:
        reader = codec.Reader(blobs, request["memory"], lambda n, _: self.functions[n])
        args, named = reader.read(request["args"]), reader.read(request["named"])
        before = [codec.storage_bytes(storage) for storage in reader.storages]
        try:
            with withheld(request["withheld"]):
                value = self.functions[request["function"]](*args, **named)
        except BaseException as error:
            return channel.said(error, _line(error)), []
        writer = codec.Writer(self._number)
        writer.knows(reader.storages)
        return self._written(value, writer, before)

    def _export(self, request: Any, _: list[bytes]) -> channel.Answer:
        try:
            return {"value": None}, [cloudpickle.dumps(self.functions[request["function"]])]
        except BaseException as error:
            return channel.said(error), []

    def _written(
        self, value: Any, writer: codec.Writer, before: list[bytes] | None = None
    ) -> channel.Answer:
        written = writer.write(value)
        return {"value": written, "memory": writer.memory(before)}, writer.blobs

    def _number(self, value: Any) -> int | None:
        """A function's number: it stays here."""
        sympy = sys.modules.get("sympy")
        if not callable(value) or (sympy and isinstance(value, sympy.Basic)):
            return None
        for number, known in enumerate(self.functions):
            if known is value:
                return number
        self.functions.append(value)
        return len(self.functions) - 1


def _line(error: BaseException) -> str:
    """The last line of a cell's own code that led to the error."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "ipython-input" in frame.filename or "ipykernel" in frame.filename:
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"line {frame.lineno} of your cell: {source}"[:500]
    return ""


if __name__ == "__main__":
    channel.serve(Cells())
    channel.stop()
