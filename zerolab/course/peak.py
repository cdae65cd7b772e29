"""Where in a step a rank holds most: counted part by part, and why stage 3 can peak highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerolab.practice.measure import Job, count
from zerolab.practice.meter import KINDS
from zerolab.practice.world import World
from zerolab.theory.memory import DEFAULT_RECIPE, held_bytes, padding, recipe_named
from zerolab.theory.residual import gathered_bytes

Rows = list[tuple[str, dict[str, int]]]


def step_timeline(stage: int, ranks: int, world: World | None = None, **more: Any) -> Rows:
    """The parts of a step in their order, and rank 0's bytes by kind at the peak of each.

    Parts are "forward 0" to "backward 0" (units by their place), "reduce" from the start of a
    reduction to the next part, and "update". Every row has all kinds, so that rows can be stacked
    in a figure; the highest row is the step's peak. `more` are further fields of Job.
    """
    job = Job(stage, **{"steps": 2, **more})
    if world is None:
        with World(ranks) as own_world:
            return step_timeline(stage, ranks, own_world, **more)
    kinds = (*KINDS, "gathered", "temporary", "other")
    timeline = world.run(count, job)[0].timeline
    return [(name, {kind: held.get(kind, 0) for kind in kinds}) for name, held in timeline]


def stage_3_above_stage_2(
    at_work: int, units: Sequence[int], ranks: int, recipe: str = DEFAULT_RECIPE
) -> int:
    """Bytes that stage 3 holds above stage 2 while a unit computes; below 0, it holds less.

    `at_work` is the place of that unit in `units`, their sizes. At one and the same moment of
    forward or backward both stages hold the same gradients (whole ones of the unit, shards of
    those behind it), optimizer states and activations. They differ in the parameters, of w bytes
    each: stage 2 has all, wΨ. Stage 3 has its shards, wΨ/N, and the gathered unit of u, wu. So

        stage 3 - stage 2 = w (u - Ψ(N-1)/N)        (u and Ψ with padding)

    which is above 0 where the unit has more than (N-1)/N of all parameters: always on one rank,
    and with a unit of more than a half on two. During a reduction and the update nothing is
    gathered, and stage 3 holds wΨ(N-1)/N less. If no unit is that large, stage 3 is below stage 2
    at every moment, and so are the peaks; if one is, and stage 2 has its peak while this unit is
    at work, then stage 3's is higher by at least this much.
    """
    sizes = list(units)
    unit = sizes[at_work] + padding(sizes[at_work], ranks)
    two, three = (held_bytes(stage, ranks, sum(sizes), recipe, sizes) for stage in (2, 3))
    gathered = gathered_bytes([unit], recipe_named(recipe), prefetch=0)
    return three["parameters"] + gathered - two["parameters"]


def why_stage_3_peaks(units: Sequence[int], ranks: int, recipe: str = DEFAULT_RECIPE) -> str:
    """Says in a sentence which of stages 2 and 3 holds more while the largest unit computes."""
    largest = max(range(len(units)), key=lambda place: units[place])
    more = stage_3_above_stage_2(largest, units, ranks, recipe)
    share = units[largest] / sum(units)
    return (
        f"While unit {largest}, with {share:.0%} of the parameters, is at work on {ranks} "
        f"rank{'' if ranks == 1 else 's'}, stage 3 holds {abs(more):,} bytes "
        f"{'more' if more > 0 else 'less'} than stage 2: it gathers the unit, and does without "
        f"{ranks - 1}/{ranks} of all parameters."
    )
