"""Can this machine run the course? One line for each thing that it needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the examination: what, how it is, and what to do where it is not fine."""

    what: str
    state: str
    fine: bool = True
    advice: str = ""

    def __str__(self) -> str:
        mark = "ok " if self.fine else "-- "
        return f"{mark} {self.what}: {self.state}" + (f". {self.advice}" if self.advice else "")


def examine() -> list[Finding]:
    """Looks at versions, cores, memory, and starts a world of two ranks; never raises."""
    return [*_versions(), _cores(), _memory(), *_processes(), *_ranks()]


def _versions() -> list[Finding]:
    found = [Finding("Python", platform.python_version(), sys.version_info >= (3, 11))]
    for package in ("torch", "jupyterlab", "ipywidgets", "matplotlib", "sympy"):
        try:
            found.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            advice = "Install the course again: pip install -c constraints.txt -e ."
            found.append(Finding(package, "missing", False, advice))
    return found


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("cores", str(cores))


def _memory() -> Finding:
    from zerolab.practice.launcher.host import free_bytes

    free = free_bytes()
    advice = "" if free > 1e9 else "Close other programs: four ranks need about 0.3 GB."
    return Finding("free memory", f"{free / 1e9:.1f} GB", free > 1e9, advice)


def _processes() -> list[Finding]:
    """What is left of a limit of processes and threads, where there is one."""
    from zerolab.practice.launcher.host import tasks_left

    if (left := tasks_left()) is None:
        return []
    advice = "" if left >= 100 else "Shut down other kernels: an exercise may need about a hundred."
    return [Finding("processes and threads", f"{left} more are allowed", left >= 100, advice)]


def _ranks() -> list[Finding]:
    from zerolab.practice.launcher.launch import start_method
    from zerolab.practice.world import World

    how = "forked from a server that has loaded torch"
    if start_method() == "spawn":
        how = "spawned, so each loads torch itself and a World takes seconds to start"
    started = Finding("start of ranks", how)
    began = time.perf_counter()
    try:
        with World(2) as world:
            answer = world.run(_sum_of_ranks)
            seconds, private = time.perf_counter() - began, world.private_ports
    except Exception as error:
        advice = "Ranks are what the lessons run on; report this line."
        return [started, Finding("ranks", f"cannot start: {error}", False, advice)]
    right = answer == [1.0, 1.0]
    ready = Finding("ranks", f"two started and added 0 + 1 in {seconds:.1f} s", right)
    if private:
        return [started, ready, Finding("ports", "private: no other user can reach the ranks")]
    advice = "Others on this machine can reach the ranks' ports; on a shared host use a container."
    return [started, ready, Finding("ports", "on this machine's loopback", True, advice)]


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()
