"""A toy device of limited memory and a slower link, both emulated: never a real machine's figures.

A world made with `World(4, device_memory="64 MB", link="100 MB/s", latency="50 us")` gives them to
its ranks. The device refuses what does not fit, and says what it was full of. The link delays
every collective to what a link of that rate and latency would take.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20,
          "gib": 2**30}  # fmt: skip
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def _read(value: float | str, units: dict[str, float], what: str, example: str) -> float:
    text = f"{value}" if isinstance(value, int | float) else value
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*", str(text).lower())
    try:
        amount = float(found[1]) * units[found[2]] if found else -1.0
    except (KeyError, ValueError):
        amount = -1.0
    if isinstance(value, bool) or not 0 < amount < math.inf:
        raise ValueError(f"{what} is {value!r} and must be more than 0, such as {example!r}.")
    return amount


def read_bytes(value: float | str) -> int:
    """Bytes from 64e6 or "64 MB" (MB is 1e6, MiB is 2^20); ValueError for anything else."""
    return max(1, int(_read(value, dict(_SIZES), "device_memory", "64 MB")))


def read_rate(value: float | str) -> float:
    """Bytes per second from 1e8 or "100 MB/s"."""
    rate = value[:-2] if isinstance(value, str) and value.lower().endswith("/s") else value
    return _read(rate, dict(_SIZES), "link", "100 MB/s")


def read_seconds(value: float | str) -> float:
    """Seconds from 5e-5 or "50 us"."""
    return _read(value, {"": 1.0, **_TIMES}, "latency", "50 us")


@dataclass
class Link:
    """An emulated link: one message after another leaves this rank at `bytes_per_s`.

    A collective of m messages and S bytes is on its way for m·latency + S/rate seconds: for a ring
    of N ranks, (N-1)·alpha + (N-1)/N·S/B (Thakur et al. 2005). `busy_s` adds these times up.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    free_at: float = 0.0
    busy_s: float = 0.0

    def take(self, messages: int, num_bytes: int) -> float:
        """Books a collective; the moment (time.monotonic) at which it has arrived."""
        takes_s = messages * self.latency_s + num_bytes / self.bytes_per_s
        self.busy_s += takes_s
        self.free_at = max(time.monotonic(), self.free_at) + takes_s
        return self.free_at


@dataclass
class Toy:
    """What this rank's world emulates: a device's capacity in bytes, a link; None for neither."""

    device_bytes: int | None = None
    link: Link | None = None
    meter: Any = None  # the device's own, made at its first use

    @classmethod
    def read(
        cls, memory: float | str | None, link: float | str | None, latency: float | str | None
    ) -> Toy:
        """From what a World is given; ValueError, in one sentence, for what is no amount."""
        made = None
        if link is not None or latency is not None:
            rate = float("inf") if link is None else read_rate(link)
            made = Link(rate, 0.0 if latency is None else read_seconds(latency))
        return cls(None if memory is None else read_bytes(memory), made)


here = Toy()
"""This rank's; the notebook's own process has none."""


@contextlib.contextmanager
def device() -> Iterator[None]:
    """On the toy device, where there is one: DeviceFull as soon as live tensors exceed it."""
    if here.device_bytes is None:
        yield
        return
    from zerolab.practice.meter import Meter

    here.meter = here.meter or Meter(here.device_bytes)
    gc.collect()  # what an earlier call left in cycles is no longer on the device
    with here.meter:
        yield


class DeviceFull(RuntimeError):
    """The toy device cannot hold what was asked for."""
