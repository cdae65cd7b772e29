"""The time of a step with offload: predicted from this machine's rates, beside the clock's."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from zerolab.practice.gpt import GPTConfig
from zerolab.practice.measure import Job
from zerolab.practice.offload import CHOICES, Offload
from zerolab.practice.precision import precision_of
from zerolab.practice.rates import Rates, Timed, average, time_schedules
from zerolab.practice.world import World
from zerolab.theory.offload import blocks
from zerolab.theory.timeline import Task, run

MODEL = GPTConfig(width=256, layers=4)  # 3.2 million parameters: work outweighs the calls
STATES = 12  # bytes of each element
LIMIT_S = 900.0


@dataclass(frozen=True)
class Prediction:
    """One schedule: seconds of a step predicted and measured, and of the disk's part alone."""

    schedule: str
    predicted_s: float
    measured_s: float
    disk_s: float  # what the measured rates of the disk allow; 0 without one

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


@dataclass(frozen=True)
class TimeReport:
    """All schedules of one stage and tier on this machine."""

    stage: int
    params: int
    rates: Rates
    device_s: float
    predictions: tuple[Prediction, ...]
    disk_share: float | None  # of a plain step: what the disk's rate allows, over measured
    disk_share_after_backward: float | None  # the same, of what follows after backward alone

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return asdict(self) | {"ratios": {p.schedule: p.ratio for p in self.predictions}}

    def as_text(self) -> str:
        """The rates, and a line for each schedule."""
        lines = [*self.rates.lines(), "", f"forward and backward: {1e3 * self.device_s:.0f} ms"]
        lines.append(f"{'schedule':10}{'predicted':>12}{'measured':>12}{'ratio':>8}")
        for p in self.predictions:
            took = f"{1e3 * p.predicted_s:>9.0f} ms{1e3 * p.measured_s:>9.0f} ms{p.ratio:>8.2f}"
            lines.append(f"{p.schedule:10}{took}")
        if self.disk_share is not None:
            after = self.disk_share_after_backward
            lines.append("time that the disk's rate allows, over time measured, plain schedule:")
            lines.append(f"{self.disk_share:.2f} of a step, {after:.2f} of what follows backward")
        return "\n".join(lines)


def predict_s(
    offload: Offload, rates: Rates, device_s: float, shards: list[int], recipe: str, stage: int
) -> tuple[float, float]:
    """Seconds of a step, and the least that the disk alone leaves of it after backward.

    What the CPU's threads do adds up where ranks have no core to spare; then a delayed update
    gains nothing but the disk's time.
    """
    p, late = precision_of(recipe), offload.schedule == "delayed"
    copies = (p.gradient.itemsize + p.working.itemsize) / rates.copy_bytes_per_s
    gather = (rates.ranks - 1) * p.working.itemsize / rates.loopback_bytes_per_s * (stage < 3)
    update = 1 / rates.adamw_elements_per_s
    if offload.optimizer == "cpu":
        each = sum(shards)
        moved, computed = each * (copies + gather), each * update
        spare = rates.cores >= 2 * rates.ranks
        if late and spare:
            return max(device_s, computed) + moved, 0.0
        return device_s + moved + computed, 0.0
    below = update + 2 * STATES / rates.checksum_bytes_per_s + (0 if late else copies + gather)
    first = Task("forward", "compute", 0 if late else device_s / 3)  # what backward takes is twice
    made = run(_disk_step(rates, shards, first, below))
    disk = run(_disk_step(rates, shards, first, 0.0)).total_s - 3 * first.seconds
    passed, disk_s = made.total_s + 2 * rates.flush_s, disk + 2 * rates.flush_s
    if not late:
        return passed, disk_s
    busy = device_s if rates.cores >= 2 * rates.ranks else device_s + sum(shards) * below
    return max(busy, passed) + sum(shards) * (copies + gather), disk_s


def _disk_step(rates: Rates, shards: list[int], first: Task, below: float) -> list[Task]:
    """Two units' states are read while backward runs, each other one when a buffer is free."""
    backward = Task("backward", "compute", 2 * first.seconds, ("forward",))
    tasks, order = [first, backward], [("read", 0), ("read", 1)]
    for u in range(len(shards)):
        order += [("update", u), ("write", u), ("read", u + 2)]
    for what, u in order:
        if u < len(shards):
            size = blocks(STATES * shards[u])
            seconds = {"read": size / rates.read_bytes_per_s, "update": shards[u] * below,
                       "write": size / rates.write_bytes_per_s}[what]  # fmt: skip
            after = {"read": ("forward",), "update": (f"read {u}", "backward"),
                     "write": (f"update {u}",)}[what]  # fmt: skip
            stream = "cpu optimizer" if what == "update" else "disk"
            tasks.append(Task(f"{what} {u}", stream, seconds, after))
    return tasks


def time_offload(
    stage: int, ranks: int, offload: Offload, recipe: str = "adamw-mixed",
    model: GPTConfig = MODEL, rounds: int = 5,
) -> TimeReport:  # fmt: skip
    """Measures rates, then every schedule that the stage can run, and predicts each."""
    offload.check(stage, recipe)
    if offload.parameters != "device":
        raise ValueError("Times are predicted for optimizer offload: leave parameters on device.")
    offloads = [Offload(offload.optimizer, schedule=s, folder=offload.folder)
                for s in CHOICES["schedule"] if stage > 1 or s != "stream"]  # fmt: skip
    with World(ranks, timeout=LIMIT_S) as world:
        timed: list[Timed] = world.run(time_schedules, Job(stage, recipe, model), offloads, rounds)
    rates = average([t.rates for t in timed])
    device_s = statistics.mean(t.device_s for t in timed)
    found, share, after = [], None, None
    for one in offloads:
        predicted, disk_s = predict_s(one, rates, device_s, timed[0].shards, recipe, stage)
        measured = statistics.mean(t.step_s[one.schedule] for t in timed)
        found.append(Prediction(one.schedule, predicted, measured, disk_s))
        if one.schedule == "plain" and disk_s:
            share = (device_s + disk_s) / measured
            after = disk_s / statistics.mean(t.update_s["plain"] for t in timed)
    params = sum(timed[0].shards) * ranks
    return TimeReport(stage, params, rates, device_s, tuple(found), share, after)
