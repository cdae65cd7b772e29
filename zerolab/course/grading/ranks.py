"""Runs trials on ranks in a sandbox: `python -m … .ranks`.

The trial comes from the grader, the learner's functions come as they were exported where the
notebook runs; only a rank unpickles them. What it returns leaves it as JSON and raw bytes.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import Any

from zerolab.course import kept
from zerolab.course.grading import channel, codec
from zerolab.practice.world import RankError, RankTimeout


@dataclass(frozen=True)
class Learners:
    """Stands, among a trial's arguments, for the learner's function of that number."""

    number: int


# What answers on ranks are asked to write, and what runs it: none of it is there for them to call.
WITHDRAWN = frozenset(
    f"zerolab.practice.{name}"
    for name in (
        "stage0", "stage1", "stage2", "stage3", "reduction", "gathering", "ring", "offload",
        "measure", "train", "step", "bench", "checkpoint", "dry_run", "observe", "peers",
    )
)  # fmt: skip
_put_away: dict[str, Any] = {}


class _Withdrawn(MetaPathFinder):
    """Refuses, in words, what is withdrawn."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name in WITHDRAWN and _put_away:
            raise ModuleNotFoundError(
                f"{name} cannot be used in a graded answer: write it yourself"
            )


def _withdraw() -> None:
    """From here on an import of what is withdrawn fails on this rank; the trial has its own."""
    _put_away["zerolab.practice"] = package = sys.modules["zerolab.practice"]
    for name in WITHDRAWN & set(sys.modules):
        _put_away[name] = sys.modules.pop(name)
        vars(package).pop(name.rpartition(".")[2], None)
    if not any(isinstance(finder, _Withdrawn) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Withdrawn())


def _give_back() -> None:
    """Undoes `_withdraw`, for the next trial on the same ranks."""
    package = _put_away.pop("zerolab.practice", None)
    for name, module in _put_away.items():
        sys.modules[name] = module
        setattr(package, name.rpartition(".")[2], module)
    _put_away.clear()


def _in_rank(trial: bytes, functions: Sequence[bytes]) -> tuple[str, list[bytes]]:
    """Runs on a rank: the trial, with the learner's functions in their places."""
    loaded: dict[int, Any] = {}

    def place(value: Any) -> Any:
        if isinstance(value, Learners):
            if value.number not in loaded:
                loaded[value.number] = pickle.loads(functions[value.number])
            return loaded[value.number]
        if isinstance(value, list | tuple):
            return type(value)(place(one) for one in value)
        return value

    _give_back()
    function, args = pickle.loads(trial)
    _withdraw()
    writer = codec.Writer()
    written = writer.write(function(*place(args)))
    return json.dumps([written, writer.memory()]), writer.blobs


def _answer(request: Any, blobs: list[bytes]) -> channel.Answer:
    trial, ready, *functions = blobs
    if request["fresh"]:
        kept.renew()
    try:
        found = kept.run(
            request["size"],
            _in_rank,
            trial,
            functions,
            ranks=request["ranks"],
            ready=pickle.loads(ready),
            starting=contextlib.nullcontext,
        )
    except (RankError, RankTimeout) as error:
        return channel.said(error, error.where), []
    texts = [text for text, _ in found]
    return (
        {"value": texts, "blobs": [len(each) for _, each in found]},
        [blob for _, each in found for blob in each],
    )


if __name__ == "__main__":
    from zerolab.course.grading import ranks as this  # ranks find `_in_rank` by this name

    channel.serve(this._answer)
    channel.stop()
