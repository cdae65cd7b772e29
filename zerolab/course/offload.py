"""Offload, derived beside counted: what each tier holds and what crosses each edge, to the byte."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerolab.course.columns import derived_and_counted
from zerolab.course.measure import LIMIT_S
from zerolab.practice.measure import Job, train_in_one_process
from zerolab.practice.offload import Offload
from zerolab.practice.offload_count import OffloadCount, count_offloaded
from zerolab.practice.world import World
from zerolab.theory.offload import Below, below
from zerolab.theory.traffic import sent_bytes

Sizes = dict[str, dict[str, int]]
TIER_OF = {"device": "gpu", "cpu": "cpu", "disk": "nvme"}  # practice's word: theory's


@dataclass(frozen=True)
class OffloadComparison:
    """One stage with offload on one number of ranks; bytes per rank, and per step where they move.

    predicted, measured  {"held on the device": {kind: bytes}, …}; measured is rank 0's, and
                         `equal` says that every rank's equals the prediction, nothing left over
    bitwise              weights and working parameters have the bits of one process: that trains
                         as without offload, or if "delayed", that delays each update likewise
    same_as_undelayed    whether the weights are those of training without delay
    difference           the largest difference of a weight from training without delay
    """

    stage: int
    ranks: int
    recipe: str
    steps: int
    params: int
    offload: Offload
    predicted: Sizes
    measured: Sizes
    how: str
    cached_bytes: int | None
    peak_bytes: int
    losses: list[float]
    equal: bool
    bitwise: bool
    same_as_undelayed: bool
    difference: float

    @property
    def agrees(self) -> bool:
        """All that must agree does; a delayed update must differ from one that is not."""
        late = self.offload.schedule == "delayed"
        return self.equal and self.bitwise and (late or self.same_as_undelayed)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain numbers and strings, for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """Derived and counted side by side, and what became of the weights."""
        o = self.offload
        lines = [
            f"stage {self.stage} on {self.ranks} ranks, {self.params:,} parameters, {self.recipe}",
            f"optimizer states: {o.optimizer}; parameters: {o.parameters}; schedule: {o.schedule}",
            "",
            *derived_and_counted(
                "bytes per rank",
                [(title, sizes, self.measured[title]) for title, sizes in self.predicted.items()],
                width=42,
            ),
        ]
        kind = "one process that delays likewise" if o.schedule == "delayed" else "one process"
        bits = f"weights after {self.steps} steps are those of {kind}, bit for bit"
        lines += [
            "",
            f"derived equals counted on every rank: {_yes(self.equal)}",
            f"{bits}: {_yes(self.bitwise)}",
        ]
        if o.schedule == "delayed":
            lines.append(
                "the same as without delay: "
                + ("yes" if self.same_as_undelayed else "no")
                + f"; the largest difference of a weight is {self.difference:.1e}"
            )
        if "disk" in (o.optimizer, o.parameters):
            cached = "unknown" if self.cached_bytes is None else f"{self.cached_bytes:,} bytes"
            lines.append(f"files: {self.how}; in the page cache: {cached}")
        return "\n".join(lines)


def measure_offload(
    stage: int,
    ranks: int,
    offload: Offload,
    recipe: str = "adamw-mixed",
    steps: int = 10,
    world: World | None = None,
    **more: Any,
) -> OffloadComparison:
    """Trains the small GPT with offload and holds all bytes and bits against what is derived.

    `more` are further fields of `zerolab.practice.measure.Job`. ValueError, in one sentence, for
    what cannot be run.
    """
    offload.check(stage, recipe)
    least = 2 if offload.schedule == "delayed" else 1
    if steps < least:
        raise ValueError(f"{steps} steps show nothing: train for at least {least}.")
    job = Job(stage, recipe, steps=steps, **more)
    if world is None:
        with World(ranks, LIMIT_S) as own_world:
            return _compare(job, offload, own_world)
    return _compare(job, offload, world)


def _compare(job: Job, offload: Offload, world: World) -> OffloadComparison:
    n, late = world.size, int(offload.schedule == "delayed")
    counts: list[OffloadCount] = world.run(count_offloaded, job, offload)
    first = counts[0]
    expected = _expected(job, offload, n, first)
    weights, digest = world.run(train_in_one_process, job, n, delay=late, ranks=[0])[0]
    undelayed = world.run(train_in_one_process, job, n, ranks=[0])[0][0] if late else weights
    return OffloadComparison(
        stage=job.stage,
        ranks=n,
        recipe=job.recipe,
        steps=job.steps,
        params=first.params,
        offload=offload,
        predicted=expected,
        measured=_counted(first, expected),
        how=first.how,
        cached_bytes=first.cached,
        peak_bytes=max(c.peak for c in counts),
        losses=[sum(losses) / n for losses in zip(*(c.losses for c in counts), strict=True)],
        equal=all(_counted(c, expected) == expected and _nothing_else(c, expected) for c in counts),
        bitwise=all(torch.equal(c.weights, weights) and c.digest == digest for c in counts),
        same_as_undelayed=torch.equal(first.weights, undelayed),
        difference=float((first.weights - undelayed).abs().max()),
    )


def _expected(job: Job, offload: Offload, ranks: int, c: OffloadCount) -> Sizes:
    made: Below = below(
        job.stage, ranks, c.params, c.units, job.recipe, TIER_OF[offload.optimizer],
        TIER_OF[offload.parameters], offload.schedule, job.micro_batches,
    )  # fmt: skip
    travel = job.stage, ranks, c.params, job.recipe, c.units, job.micro_batches
    return {
        "held on the device": made.gpu,
        "held in the CPU's memory": made.cpu,
        "crossed in a step": {"down": made.down, "up": made.up},
        "disk": {"files": made.files, "read": made.read, "written": made.written},
        "sent in a step": sent_bytes(*travel),
    }


def _counted(c: OffloadCount, expected: Sizes) -> Sizes:
    found = {
        "held on the device": c.held["device"],
        "held in the CPU's memory": c.held["cpu"],
        "crossed in a step": c.crossed,
        "disk": c.disk,
        "sent in a step": c.sent,
    }
    return {title: {name: found[title][name] for name in expected[title]} for title in expected}


def _nothing_else(c: OffloadCount, expected: Sizes) -> bool:
    """Neither tier holds anything that was not predicted."""
    device, cpu = expected["held on the device"], expected["held in the CPU's memory"]
    totals = {"device": sum(device.values()), "cpu": sum(cpu.values())}
    return all(c.held[tier]["total"] == total for tier, total in totals.items())


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"
