"""How fast this machine does each thing that a step with offload is made of, and the step itself.

All ranks measure at the same time, since in a step they share cores, memory and disk too. Medians
of several rounds; other programs disturb them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from zerolab.practice import data
from zerolab.practice.adamw import AdamW
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT
from zerolab.practice.measure import STAGES, Job
from zerolab.practice.offload import Offload, Offloaded
from zerolab.practice.statefile import Buffer
from zerolab.practice.stores import filesystem, open_file

ELEMENTS = 2**20  # of each measurement: 12 MiB of states
ROUNDS = 5
STEPS = 4  # of one engine, before it is the next one's turn


@dataclass(frozen=True)
class Rates:
    """What one of `ranks` ranks gets while all are at work; rates in one direction.

    `adamw_elements_per_s` widens 16-bit gradients, updates and narrows the weights again.
    `flush_s` is how long the disk takes to say that it has everything.
    """

    ranks: int
    cores: int
    copy_bytes_per_s: float
    loopback_bytes_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    checksum_bytes_per_s: float
    adamw_elements_per_s: float
    flush_s: float
    disk: str

    def lines(self) -> list[str]:
        """A line for each rate."""
        gb = {name[: -len("_bytes_per_s")]: f"{rate / 1e9:.2f} GB/s"
              for name, rate in asdict(self).items() if name.endswith("_bytes_per_s")}  # fmt: skip
        return [
            f"each of {self.ranks} ranks, all at work, on {self.cores} cores:",
            f"memory copy {gb['copy']}",
            f"loopback {gb['loopback']} sent",
            f"disk read {gb['read']}, write {gb['write']}, flush {1e3 * self.flush_s:.1f} ms",
            f"disk files {self.disk}",
            f"checksum {gb['checksum']}",
            f"AdamW {self.adamw_elements_per_s / 1e6:.0f} million elements/s, conversions included",
        ]


def median_s(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of an action that all ranks take at the same time, after one that does not count."""
    taken = []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


@torch.no_grad()
def measure_rates(
    folder: str | None = None, rounds: int = ROUNDS, record_bytes: int = 12 * ELEMENTS
) -> Rates:
    """Measures this rank's rates (call it on all ranks).

    A disk's depend on how much is read or written at a time: records of `record_bytes`.
    """
    comm, size = Comm(), record_bytes
    one, other = (torch.ones(ELEMENTS, dtype=torch.bfloat16) for _ in range(2))
    shard, full = torch.ones(ELEMENTS), torch.ones(ELEMENTS * comm.world_size)
    adamw, wide = AdamW(torch.ones(ELEMENTS)), torch.ones(ELEMENTS)
    file = open_file(folder, "measured rates", [size] * 4)
    buffers = Buffer(size), Buffer(size)  # as in a step; one alone would stay in the caches

    def each(action: Callable[[int, Buffer], None]) -> None:
        for index in range(4):
            action(index, buffers[index % 2])

    def update() -> None:
        adamw.update(wide.copy_(one), 1.0)
        other.copy_(adamw.master)

    each(file.sign)
    actions: dict[str, Callable[[], object]] = {
        "write": lambda: each(file.write),
        "flush": file.commit,
        "read": lambda: each(file.read),
        "checksum": lambda: file.check(0, buffers[0]),
        "send": lambda: comm.all_gather(full, shard),
        "copy": lambda: other.copy_(one),
        "update": update,
    }
    seconds = {name: median_s(action, rounds) for name, action in actions.items()}
    made = Rates(
        ranks=comm.world_size,
        cores=cores(),
        copy_bytes_per_s=one.nbytes / seconds["copy"],
        loopback_bytes_per_s=shard.nbytes * max(1, comm.world_size - 1) / seconds["send"],
        read_bytes_per_s=4 * size / seconds["read"],
        write_bytes_per_s=4 * size / seconds["write"],
        checksum_bytes_per_s=size / seconds["checksum"],
        adamw_elements_per_s=ELEMENTS / seconds["update"],
        flush_s=seconds["flush"] / 2,  # a commit waits twice
        disk=f"{file.how}, on {filesystem(file.path)}",
    )
    file.close()
    return made


def cores() -> int:
    """Cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def average(rates: list[Rates]) -> Rates:
    """What an average one of them is."""
    numbers = [name for name, value in asdict(rates[0]).items() if isinstance(value, float)]
    means = {name: statistics.mean(getattr(r, name) for r in rates) for name in numbers}
    return replace(rates[0], **means)


@dataclass(frozen=True)
class Timed:
    """Median seconds on this rank, and what the steps of each schedule handle.

    device_s   forward and backward of the stage without offload, on the slowest rank
    step_s     a whole step of each schedule
    update_s   of it, what follows after backward
    shards     this rank's elements of each unit, padding included
    rates      measured between the steps, so that both see the same machine
    """

    device_s: float
    step_s: dict[str, float]
    update_s: dict[str, float]
    shards: list[int]
    rates: Rates


def time_schedules(job: Job, offloads: list[Offload], rounds: int = ROUNDS) -> Timed:
    """Times the stage's device part and each schedule, by turns (call it on all ranks)."""
    comm = Comm()
    engines: dict[str, Offloaded] = {}
    plain = STAGES[job.stage](GPT(job.model), comm, job.options, job.recipe, **job.engine)
    for offload in offloads:
        model = GPT(job.model)
        engines[offload.schedule] = Offloaded(
            job.stage, model, comm, job.options, job.recipe, offload, **job.engine
        )
    device: list[float] = []
    step: dict[str, list[float]] = {name: [] for name in engines}
    update: dict[str, list[float]] = {name: [] for name in engines}
    rates, shards = [], [unit.padded // comm.world_size for unit in plain.units]
    for _ in range(rounds):
        rates.append(measure_rates(offloads[0].folder, 1, 12 * max(shards)))
        for name, engine in {"": plain, **engines}.items():
            for at in range(STEPS):
                batches = data.batch(at, comm.rank, comm.world_size)
                dist.barrier()
                began = time.perf_counter()
                engine.backward(engine.model.loss(*batches))
                if not name:
                    dist.barrier()  # a step, too, lasts until the slowest rank is done
                between = time.perf_counter()
                engine.step(job.max_norm)
                dist.barrier()
                ended = time.perf_counter()
                if at == 0:
                    continue  # memory is not warm yet, and nothing delayed is on its way
                if name:
                    step[name].append(ended - began)
                    update[name].append(ended - between)
                else:
                    device.append(between - began)
            if name:
                engines[name].finish()  # the next engine's time is its own
    for engine in engines.values():
        engine.close()
    return Timed(
        device_s=statistics.median(device),
        step_s={name: statistics.median(taken) for name, taken in step.items()},
        update_s={name: statistics.median(taken) for name, taken in update.items()},
        shards=shards,
        rates=average(rates),
    )
