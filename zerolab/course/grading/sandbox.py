"""A program of the grader's in a sandbox, and the messages to and from it.

`Box` starts a module of this package in Linux namespaces, see `box`; where the system does not
allow that, in a plain process with what limits there are, and `trusted_only` says so. What it may
use is watched from outside; what goes beyond is killed, and the sentence says what it was.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import zerolab
from zerolab.course import kept
from zerolab.course.grading import channel
from zerolab.course.grading.channel import DEBUG

WATCH_S = 0.2
PATIENCE = 4
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/fonts",
    "/etc/group", "/etc/hosts", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types",
    "/etc/nsswitch.conf", "/etc/passwd",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use, in bytes, processes and seconds of CPU time for each process."""

    memory_bytes: int = 4 * 2**30
    processes: int = 48
    disk_bytes: int = 128 * 2**20
    cpu_seconds: int = 600


class Died(Exception):
    """The sandbox ended while an answer was waited for; the sentence says how."""


class TooLate(Exception):
    """No answer within the time."""


def _package() -> Path:
    return Path(zerolab.__file__).parent


def _libraries() -> list[str]:
    """The folders of installed packages; a checkout's own folder, with its solutions, is none."""
    return [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]


def _visible() -> list[str]:
    """What Python needs in order to run the package; nothing beside it."""
    package = _package()
    if Path(sys.prefix) in package.parents and "site-packages" not in package.parts:
        raise RuntimeError(
            f"the environment {sys.prefix} holds the course itself: make one elsewhere, since "
            "learners' code sees the environment"
        )
    paths = sorted({*SYSTEM, sys.prefix, sys.base_prefix, str(package), *_libraries()})
    return [p for p in paths if not any(Path(other) in Path(p).parents for other in paths)]


def _spec(root: str, limits: Limits, command: list[str], more: dict[str, str]) -> dict[str, Any]:
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "HOME": "/tmp/home",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([str(_package().parent), *_libraries()]),
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "ZEROLAB_PROGRESS": "off",
        "ZEROLAB_HOST_NETWORK": "1",  # the sandbox's own loopback is private already
        **{name: os.environ[name] for name in [DEBUG, kept.PATIENCE] if name in os.environ},
        **more,
    }
    return {
        "root": root,
        "visible": _visible(),
        "hidden": [str(_package() / "course" / "checks")],
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "disk_bytes": limits.disk_bytes,
        "cpu_seconds": limits.cpu_seconds,
        "command": command,
        "environment": environment,
    }


def _launch(spec: dict[str, Any], **streams: Any) -> subprocess.Popen[bytes]:
    """In namespaces; `streams` as subprocess takes them."""
    command = [sys.executable, "-m", "zerolab.course.grading.box", json.dumps(spec)]
    return subprocess.Popen(command, env=own_environment(), **streams)


def own_environment() -> dict[str, str]:
    """This process's environment, for a program of the package's own that finds what this finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@functools.cache
def trusted_only() -> str:
    """Why this system gives no sandbox, in a few words; "" where it does."""
    if sys.platform != "linux":
        return f"{sys.platform} has no Linux namespaces"
    root = tempfile.mkdtemp(prefix="zerolab-box-")
    try:
        spec = _spec(root, Limits(), [sys.executable, "-c", ""], {})
        pipe = subprocess.PIPE
        tried = _launch(spec, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=pipe)
        said = tried.communicate(timeout=60)[1].decode(errors="replace").strip()
        if tried.returncode == 0:
            return ""
        return said.splitlines()[-1] if said else f"the sandbox ended with {tried.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Box:
    """A module of `zerolab.course.grading` at work in a sandbox of its own.

    Raises Died where it does not start. Close it, or use it in a `with`.
    """

    def __init__(self, module: str, limits: Limits, environment: dict[str, str]) -> None:
        self.limits = limits
        self.killed_for = ""
        self.cpu_s = 0.0  # that its processes have used so far
        self._root = tempfile.mkdtemp(prefix="zerolab-box-")
        command = [sys.executable, "-m", f"zerolab.course.grading.{module}"]
        spec = _spec(self._root, limits, command, environment)
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        streams["stderr"] = None if DEBUG in os.environ else subprocess.DEVNULL
        if trusted_only():
            free = {"HOME": self._root, "TMPDIR": self._root}
            self._process = subprocess.Popen(
                command, cwd=self._root, env={**spec["environment"], **free},
                start_new_session=True, **streams,
            )  # fmt: skip
        else:
            self._process = _launch(spec, start_new_session=True, **streams)
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def ask(
        self, request: Any, blobs: list[bytes] | None = None, within_s: float = 30.0
    ) -> tuple[Any, list[bytes]]:
        """Sends a message and waits for the answer. Raises Died, TooLate or channel.Garbled.

        The seconds are of processor time, so that a busy machine takes nothing from them; who
        waits without working has PATIENCE times as many.
        """
        assert self._process.stdin
        try:
            channel.send(self._process.stdin, request, blobs)  # type: ignore[arg-type]
        except (OSError, ValueError):
            raise Died(self._how()) from None
        began, used = time.monotonic(), self.cpu_s

        def too_late() -> bool:
            passed = time.monotonic() - began
            busy = self.cpu_s - used > within_s
            return passed > PATIENCE * within_s or (busy and passed > within_s)

        return channel.receive(lambda size: self._read(size, too_late))

    def _read(self, size: int, too_late: Callable[[], bool]) -> bytes:
        assert self._process.stdout
        out, got = self._process.stdout.fileno(), bytearray()
        while len(got) < size:
            if not select.select([out], [], [], WATCH_S)[0]:
                if too_late():
                    raise TooLate
                continue
            piece = os.read(out, min(size - len(got), 1 << 20))
            if not piece:
                raise Died(self._how())
            got += piece
        return bytes(got)

    def _how(self) -> str:
        if self.killed_for:
            return self.killed_for
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._over.wait(2 * WATCH_S)
        return self.killed_for or "the program ended"

    def processes(self) -> int:
        """How many there are in it now."""
        return len(self._inside())

    def _inside(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _watch(self) -> None:
        """Kills what grows beyond its limits; namespaces and rlimits alone leave room between."""
        while self._process.poll() is None:
            if self._over.wait(WATCH_S):
                return
            inside = self._inside()
            self.cpu_s = max(self.cpu_s, sum(map(_cpu_s, inside)))
            if len(inside) > self.limits.processes:
                self._kill_for(f"it had more than {self.limits.processes} processes")
            elif (used := _memory(inside, self.limits.memory_bytes)) > self.limits.memory_bytes:
                most = self.limits.memory_bytes / 2**30
                self._kill_for(f"it used {used / 2**30:.1f} GiB of memory, at most {most:.1f}")
        self._over.set()

    def _kill_for(self, why: str) -> None:
        self.killed_for = why
        self._kill()

    def _kill(self) -> None:
        inside = self._inside()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in inside:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        """Ends everything in the sandbox."""
        self._over.set()
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self._watcher.join()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _memory(processes: list[psutil.Process], most: int) -> int:
    """Bytes of these processes; where they could be too many, what is shared counts once."""
    resident = sum(map(_resident, processes))  # never too few, and found two hundred times faster
    return resident if resident <= most else sum(map(_own_and_share, processes))


def _own_and_share(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error, AttributeError):
        return int(process.memory_full_info().pss)
    return _resident(process)


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0
