"""Runs trials on ranks in a sandbox: `python -m … .ranks`.

The trial comes from the grader, the learner's functions come as they were exported where the
notebook runs; only a rank unpickles them. What it returns leaves it as JSON and raw bytes.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerolab.course import kept
from zerolab.course.grading import channel, codec
from zerolab.practice.world import RankError, RankTimeout


@dataclass(frozen=True)
class Learners:
    """Stands, among a trial's arguments, for the learner's function of that number."""

    number: int


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

    function, args = pickle.loads(trial)
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
