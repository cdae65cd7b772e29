"""Sharding map: a training step of each stage, moment by moment, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerolab.course.plots.base import legend, style
from zerolab.course.plots.memory import shard_map
from zerolab.course.walk import Moment, Walk, walk
from zerolab.course.widgets.base import Explorer, View, canvas, numbered, slider
from zerolab.theory.notation import STAGES

RANKS = range(1, 7)


def shard_view(stage: int, ranks: int, moment: int) -> View:
    """The map after moment number `moment` of a step; ValueError where there is no such moment."""
    w = walk(stage, ranks)
    if not 0 <= moment < len(w.moments):
        raise ValueError(f"A step of stage {stage} has moments 0 to {len(w.moments) - 1}.")
    now = w.moments[moment]
    height = 1.35 + 0.48 * ranks
    figure, (ax,) = canvas(7.2, height, (0.12, 0.5 / height, 0.86, 1 - 1.35 / height))
    held = [w.elements(now.held, rank) for rank in range(ranks)]
    by_rank = [w.sent(now, rank) for rank in range(ranks)]
    sent = {kind: [one.get(kind, []) for one in by_rank] for kind in ("parameters", "gradients")}
    shard_map(ax, w.parameters(), held, sent)
    kinds = ("parameters", "gathered", "gradients", "optimizer_states")
    legend(ax, [(kind.replace("_", " "), style(kind)) for kind in kinds], lift=0.28)
    return View.of(figure, " ".join(_words(w, moment, now)), _table(w, now))


def _words(w: Walk, number: int, now: Moment) -> list[str]:
    sentences = [f"Stage {w.stage}, moment {number} of {len(w.moments) - 1}: {now.name}."]
    if now.collective and w.ranks > 1:
        name = now.collective.replace("_", "-")
        sentences.append(f"In this {name} each rank sends {now.sent_bytes:,} bytes, framed black.")
    elif now.collective:
        sentences.append("There is no other rank to send to.")
    if now.freed:
        freed = sum(w.size(part) for part in now.freed)
        kinds = sorted({part.kind.replace("_", " ") for part in now.freed})
        sentences.append(f"Each rank has freed {freed:,} bytes of {' and '.join(kinds)}.")
    total = sum(w.held_bytes(now).values())
    sentences.append(f"Now each rank holds {total:,} bytes, padding included.")
    return sentences


def _table(w: Walk, now: Moment) -> tuple[tuple[str, ...], ...]:
    rows: list[tuple[str, ...]] = [
        ("rank", "parameters", "gathered", "gradients", "optimizer states", "sends")
    ]
    sizes = w.held_bytes(now)
    for rank in range(w.ranks):
        held = w.elements(now.held, rank)
        cells = []
        for kind in ("parameters", "gathered", "gradients", "optimizer_states"):
            ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in held.get(kind, ()))
            cells.append(f"{ranges}: {sizes[kind]:,}\u00a0B" if ranges else "none")
        rows.append((str(rank), *cells, f"{now.sent_bytes:,}\u00a0B"))
    return tuple(rows)


def _moments(stage: int, ranks: int) -> list[tuple[str, int]]:
    moments = walk(stage, ranks).moments
    return [(f"{number}: {moment.name}", number) for number, moment in enumerate(moments)]


def shard_map_explorer(stage: int = 3, ranks: int = 4, moment: int = 0) -> Explorer:
    """Step through a training step: what each rank holds, sends and frees."""
    controls = {
        "stage": slider("stage", numbered(STAGES), stage),
        "ranks": slider("ranks", numbered(RANKS), ranks),
        "moment": slider("moment", _moments(stage, ranks), moment),
    }
    controls["moment"].layout.width = "600px"
    return Explorer("Sharding map", controls, shard_view, _fit_moments)


def _fit_moments(controls: Mapping[str, Any]) -> None:
    """The moment slider has the moments of the stage; it stays where it is, or at the last."""
    options, chosen = _moments(controls["stage"].value, controls["ranks"].value), controls["moment"]
    if tuple(options) != tuple(chosen.options):
        number = min(chosen.value, len(options) - 1)
        chosen.options = options  # which sets it to the first
        chosen.value = number
