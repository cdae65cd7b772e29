"""A training step as tasks on streams: what overlaps, what it costs, and what bounds it.

Streams run their tasks in the order of issue; a task starts when its stream is free and all that it
needs is done. Seconds in, seconds out. Contention between streams and launch costs are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy as sp

from zerolab.theory.derivation import Derivation
from zerolab.theory.notation import c, m

STREAMS = ("compute", "network", "host link", "cpu optimizer", "disk")


@dataclass(frozen=True)
class Task:
    """`seconds` of work on a stream, after the tasks named."""

    name: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    placed: tuple[Placed, ...]

    @property
    def total_s(self) -> float:
        return max((p.end_s for p in self.placed), default=0.0)

    def busy_s(self, stream: str) -> float:
        return sum(p.task.seconds for p in self.placed if p.task.stream == stream)

    @property
    def bound(self) -> str:
        """The stream with the most work: no schedule is shorter than it."""
        return max(STREAMS, key=self.busy_s)


def run(tasks: Sequence[Task], overlap: bool = True) -> Timeline:
    """Place tasks in the order given; without overlap each also waits for the one before."""
    ends: dict[str, float] = {}
    free: dict[str, float] = {}
    placed = []
    for task in tasks:
        start, stream = max((ends[name] for name in task.after), default=0.0), task.stream * overlap
        if task.seconds:  # what takes no time waits in no queue
            start = max(start, free.get(stream, 0.0))
            free[stream] = start + task.seconds
        ends[task.name] = start + task.seconds
        placed.append(Placed(task, start, ends[task.name]))
    return Timeline(tuple(placed))


@dataclass(frozen=True)
class Costs:
    """Seconds of a rank's step by kind of work, each for one pass over all units."""

    forward: float = 0
    backward: float = 0
    gather: float = 0  # stage 3: before forward and before backward, every micro-batch
    fetch: float = 0  # reading one's parameter shard from `fetch_from` before each gather
    fetch_from: str = "host link"
    reduce: float = 0
    reduce_every: bool = False  # after every backward, or after the last
    final_gather: float = 0  # stages 1 and 2: updated parameters
    checkpoints: float = 0  # to and from the CPU, each way, every micro-batch
    down: float = 0  # gradients to the CPU
    read: float = 0
    optimizer: float = 0  # on the CPU
    write: float = 0
    up: float = 0  # updated parameters to the GPU


def step_tasks(
    cost: Costs, units: int = 8, prefetch: int = 1, micro_batches: int = 1
) -> list[Task]:
    """The tasks of a step over `units` equal units, gathered up to `prefetch` units ahead."""
    tasks: list[Task] = []

    def add(name: str, stream: str, seconds: float, *after: str) -> str:
        tasks.append(Task(name, stream, seconds / units, after))
        return name

    order = [(f"{k}.{way}{u}", way, u, k) for k in range(micro_batches) for way in "fb"
             for u in (range(units) if way == "f" else reversed(range(units)))]  # fmt: skip
    reduced: dict[int, str] = {}
    issued = 0
    for index, (name, way, unit, k) in enumerate(order):
        while issued < min(len(order), index + 1 + prefetch):
            due = order[issued][0]
            before = order[issued - 1 - prefetch][0] if issued > prefetch else None
            first = add(f"fetch {due}", cost.fetch_from, cost.fetch, *([before] if before else []))
            add(f"gather {due}", "network", cost.gather, first)
            issued += 1
        seconds = cost.forward if way == "f" else cost.backward
        needs = [f"gather {name}"] + ([f"keep {k}.f{unit}"] if way == "b" else [])
        add(name, "compute", seconds, *needs)
        add(f"keep {name}", "host link", cost.checkpoints, name)
        if way == "b":
            due_now = cost.reduce_every or k == micro_batches - 1
            reduced[unit] = add(f"reduce {name}", "network", cost.reduce if due_now else 0, name)
    for unit in reversed(range(units)):  # the last unit's gradients are ready first
        down = add(f"down {unit}", "host link", cost.down, reduced[unit])
        read = add(f"read {unit}", "disk", cost.read)
        update = add(f"update {unit}", "cpu optimizer", cost.optimizer, down, read)
        add(f"write {unit}", "disk", cost.write, update)
        up = add(f"up {unit}", "host link", cost.up, update)
        add(f"final gather {unit}", "network", cost.final_gather, up)
    return tasks


def derive_overlap_bound() -> Derivation:
    """What overlap of one compute and one network stream can gain at most: a factor of 2."""
    title, why = "Serial time over overlapped time", "one after the other, over the longer alone"
    start = Derivation(title, (c + m) / sp.Max(c, m), why, unit="times")
    step = start.then(1 + sp.Min(c, m) / sp.Max(c, m), "c + m is the longer plus the shorter")
    return step.at_most(2, "the shorter is at most the longer; equal only where c = m")
