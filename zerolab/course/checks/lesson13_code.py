"""Lesson 13: three exercises in code: clipping on ranks, resharding, three ways to divide."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise, shown, type_of
from zerolab.course.checks.functions import plain
from zerolab.course.checks.on_ranks import RANKS, apart, on_four_and_three, on_ranks
from zerolab.practice.comm import Comm
from zerolab.practice.meter import Meter
from zerolab.practice.sharding import padded_numel, shard_of

NUMEL = 1001  # of the gradient that is clipped


@exercise(
    "13.13",
    "Clip by the norm of all",
    points=3,
    hints=[
        "The norm of the whole gradient: add up squares on each rank, then over ranks, then root.",
        "comm.control_sum(tensor) adds a few numbers over ranks. Which elements are padding?",
        (
            "mine = grad_shard[: max(0, numel - comm.rank * len(grad_shard))]; "
            "the factor is min(1, max_norm / norm)."
        ),
    ],
)
def clip_factor(answer: Any) -> None:
    seed = random.randrange(2**31)  # a gradient that nobody can have prepared
    norms = apart(_norms, seed)
    on_four_and_three(lambda size: _judge_clip(answer, seed, norms[size]))


def _judge_clip(answer: Any, seed: int, norms: list[float]) -> None:
    size = len(norms) - 2
    for max_norm in (1.0, 1e3):
        right = min(1.0, max_norm / norms[0])
        seen = on_ranks(_clip, answer, max_norm, seed, size=size)
        for rank, (value, sent) in enumerate(seen):
            if not isinstance(value, float):
                raise Wrong(
                    f"Rank {rank} returns {type_of(value)}.", "Return the factor, a number."
                )
            if not math.isclose(value, right, rel_tol=1e-4):
                raise Wrong(
                    f"With max_norm {max_norm:g} rank {rank} scales by {value:.6g}; the factor is "
                    f"{right:.6g}.",
                    _why_clip(value, norms, rank, max_norm),
                )
            if sent > 64 * size:
                raise Wrong(
                    f"The factor is right, but rank {rank} sends {sent:,} bytes for it.",
                    "One number of each rank is enough: its own sum of squares.",
                    points=1,
                )


def _gradient(ranks: int, seed: int) -> Tensor:
    """(padded numel,): beyond numel lies what torch.empty may leave, and it is made to weigh."""
    draw = torch.Generator().manual_seed(seed + ranks)
    full = torch.randn(padded_numel(NUMEL, ranks), generator=draw)
    full[NUMEL:] += 9
    return full


def _norms(seed: int) -> dict[int, list[float]]:
    """By number of ranks: the norm of the gradient, that with padding, and that of each part."""
    found = {}
    for ranks in (RANKS, 3):
        full = _gradient(ranks, seed)
        parts = [full[:NUMEL], full, *full[:NUMEL].split(len(full) // ranks)]
        found[ranks] = [float(part.double().norm()) for part in parts]
    return found


def _clip(
    answer: Callable[[Tensor, int, float, Comm], float], max_norm: float, seed: int
) -> tuple[Any, int]:
    """Runs on a rank: the value, and bytes sent."""
    comm = Comm()
    mine = shard_of(_gradient(comm.world_size, seed), comm.world_size, comm.rank).clone()
    with Meter() as meter:
        value = answer(mine, NUMEL, max_norm, comm)
        sent = meter.sent_bytes()
    if type(value) is not bool and hasattr(type(value), "__float__"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of many elements
            value = float(value)
    return value, sent["total"] + sent["control"]


def _why_clip(value: float, norms: list[float], rank: int, max_norm: float) -> str:
    norm, padded, *local = norms
    ranks = len(local)
    if max_norm < norm and math.isclose(value, norm, rel_tol=1e-4):
        return "That is the norm: return what the gradient is multiplied by."
    if value > 1:
        return "A gradient that is short enough is left as it is: the factor is never above 1."
    for wrong, words in [
        (local[rank], "That is by the norm of this rank's shard: each rank has another factor."),
        (padded, "The padding is in it: what lies beyond numel is no gradient."),
        (norm**2, "You divided by the sum of squares: its root is missing."),
        (sum(local), "Norms were added up; squares can be, norms cannot."),
        (norm / ranks, "The shards hold the mean already: nothing is divided by N."),
        (norm / ranks**0.5, "The squares are added up over ranks: nothing is divided by N."),
    ]:
        if math.isclose(value, min(1.0, max_norm / wrong), rel_tol=1e-4):
            return words
    return "min(1, max_norm / norm), where the norm's square is the sum of all ranks' squares."


@exercise(
    "13.14",
    "From one number of ranks to another",
    points=3,
    hints=[
        "Put the shards together, cut off the old padding, pad anew, cut into equal parts.",
        "torch.cat(shards)[:numel]; the new length is numel / world_size, rounded up.",
    ],
)
def reshard(answer: Any) -> None:
    for numel, before, after in ((12, 4, 3), (10, 4, 3), (1001, 3, 7), (5, 2, 8), (7, 1, 4)):
        random_order = torch.Generator().manual_seed(random.randrange(2**31))
        whole = torch.randperm(numel, generator=random_order).float()  # a 0 is among them
        shards = _cut(whole, before)
        given = [shard.clone() for shard in shards]
        got = answer(given, numel, after)
        where = f"{numel} elements from {before} ranks to {after}"
        if not isinstance(got, list | tuple):
            raise Wrong(f"{where}: you return {type_of(got)}.", "Return a list of tensors.")
        if odd := [x for x in got if type(x) is not Tensor or x.dim() != 1]:
            raise Wrong(
                f"{where}: in your list is {type_of(odd[0])}.", "Return flat tensors, one a rank."
            )
        right = _cut(whole, after)
        if [x.shape for x in got] != [x.shape for x in right]:
            raise Wrong(
                f"{where}: the lengths are {[len(x) for x in got]}, not {[len(x) for x in right]}.",
                "All shards are equally long, numel / world_size rounded up: the old padding goes, "
                "new padding comes at the end.",
            )
        for rank, (mine, expected) in enumerate(zip(got, right, strict=True)):
            if mine.dtype != expected.dtype:
                raise Wrong(f"{where}: rank {rank} gets {mine.dtype}.", "Shards keep their dtype.")
            if not torch.equal(mine, expected):
                raise Wrong(
                    f"{where}: rank {rank} gets {mine.tolist()[:8]}, not {expected.tolist()[:8]}.",
                    _why_shards(got, whole),
                )
        if len(given) != before or not all(map(torch.equal, given, shards)):
            raise Wrong(f"{where}: the old shards were changed.", "A checkpoint is only read.")


def _cut(whole: Tensor, ranks: int) -> list[Tensor]:
    full = torch.zeros(padded_numel(len(whole), ranks))
    full[: len(whole)] = whole
    return [shard_of(full, ranks, rank).clone() for rank in range(ranks)]


def _why_shards(got: Sequence[Tensor], whole: Tensor) -> str:
    flat = torch.cat(list(got))
    kept, right = ([x for x in values.tolist() if x] for values in (flat, whole))
    if kept == right:
        return "Zeros stand between elements, or a 0 is lost: cut the old padding off, by numel."
    if sorted(kept) != sorted(right):
        return "Elements are missing or there twice."
    return "Element i belongs at place i of the new shards, put end to end."


@exercise(
    "13.15",
    "Three ways to divide",
    points=3,
    hints=[
        "Flat: all elements in one row, cut into equal parts, rounded up.",
        "Rows: of d rows each rank takes ceil(d / N), as long as any are left: rank 0 is fullest.",
        "Whole: the largest parameter first, each to the rank that has the least so far.",
    ],
)
def fullest_rank(answer: Any) -> None:
    rights: dict[str, Callable[[list[tuple[int, int]], int], int]] = {
        "flat": _flat, "rows": _rows, "whole": _whole,
    }  # fmt: skip
    cases = [
        ([(100, 100), (10, 10), (10, 10), (10, 10)], 4),
        ([(5, 4), (9, 2), (1, 7)], 4),
        ([(3, 3), (6, 2), (8, 8), (2, 31), (7, 1)], 3),
        ([(2, 2)], 8),
        ([(6, 3), (4, 4), (5, 3), (2, 7), (3, 4)], 2),
    ]
    for shapes, ranks in cases:
        got = answer(list(shapes), ranks)
        if not isinstance(got, dict) or set(got) != set(rights):
            keys = f" with {', '.join(map(shown, got))}" if isinstance(got, dict) else ""
            raise Wrong(
                f"You return {type_of(got)}{keys}.", "Return a dict with flat, rows and whole."
            )
        for name, rule in rights.items():
            right = rule(shapes, ranks)
            if plain(got[name]) != right:
                earned = list(rights).index(name)
                raise Wrong(
                    f"Shapes {shapes} on {ranks} ranks, {name}: {shown(got[name])} is not it; the "
                    f"fullest rank holds {right} elements.",
                    _WHY[name],
                    points=earned,
                )


_WHY = {
    "flat": "One row of all elements, cut into equal parts: the total over N, rounded up once.",
    "rows": "ceil(rows / N) rows of each matrix, times its columns, added up: rank 0 is fullest.",
    "whole": "Largest first, each whole to the rank that holds least: then take the fullest.",
}


def _flat(shapes: list[tuple[int, int]], ranks: int) -> int:
    return math.ceil(sum(rows * columns for rows, columns in shapes) / ranks)


def _rows(shapes: list[tuple[int, int]], ranks: int) -> int:
    return sum(math.ceil(rows / ranks) * columns for rows, columns in shapes)


def _whole(shapes: list[tuple[int, int]], ranks: int) -> int:
    held = [0] * ranks
    for numel in sorted((rows * columns for rows, columns in shapes), reverse=True):
        held[held.index(min(held))] += numel
    return max(held)
