"""What ranks ask of the system, and what is done where the system does not have it.

Linux is where all of this is tested. macOS should lack nothing of it. Windows has no sessions, no
signals between processes or threads, and pipes that are no file descriptors. There a rank whose C
code keeps Python's lock is reported without its stack and may outlive a killed notebook until that
code returns; a rank stuck in gloo is restarted where another's end does not free it; and what C
code or a child process prints goes to the notebook server's terminal.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any, TextIO

import psutil

KILLED = -9  # exit code, as multiprocessing gives it, of a process ended by force
PIPES_HAVE_DESCRIPTORS = not hasattr(connection, "PipeConnection")
TUNABLES = "GLIBC_TUNABLES"  # read when a program starts
MESSAGE_BYTES = 4000  # a pipe takes as many whole, so Stop never leaves half a message
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h names them
STACK_LIMIT_S = 3.0  # for a process to write its stack; it may wait for a core
MOST_WAITED_FOR = 63  # things, by Windows at once


def loopback() -> str:
    """Return the name of the network interface that has 127.0.0.1: lo, lo0, or a longer one."""
    return interface_of("127.0.0.1") or "lo"


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with that address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return name
    return None


def files_left() -> int | None:
    """Return how many more files this process may open; None where that is not limited."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most - len(os.listdir("/dev/fd"))


def leave_session() -> None:
    """Have the terminal's Ctrl-C go to the notebook alone, which tells its ranks."""
    if hasattr(os, "setsid"):
        os.setsid()


def end_with(life: connection.Connection) -> None:
    """Have the system end this process when the other end of the pipe closes.

    That works even while C code keeps Python's lock; elsewhere the watchdog's end of file is left.
    """
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fd = life.fileno()
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO


def keep_freed_memory() -> None:
    """Have C's malloc, if it is glibc's, keep 64 MiB of what is freed for what comes next.

    It would return the buffers that come and go in every step to the system, which fills them with
    zeros for the next step: up to a twentieth of a step's time, in our stages and in their peers.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_TRIM_THRESHOLD, 64 << 20)
        set_option(M_MMAP_THRESHOLD, 32 << 20)  # what is larger is always returned


@contextlib.contextmanager
def large_pages() -> Iterator[None]:
    """Have a program that is started inside ask for pages of 2 MiB, if its C library is glibc.

    A flat buffer of many small pages costs the processor a look into their table every 4 KiB: up to
    a fifth of a step, in our stages more than in peers, whose tensors are shorter. Nothing changes
    where the variable names such pages already.
    """
    before = os.environ.get(TUNABLES)
    if "glibc.malloc.hugetlb" not in (before or ""):
        os.environ[TUNABLES] = ":".join(filter(None, [before, "glibc.malloc.hugetlb=1"]))
    try:
        yield
    finally:
        os.environ.pop(TUNABLES, None)
        if before is not None:
            os.environ[TUNABLES] = before


def interrupt_main_thread() -> None:
    """Have the main thread run its handler of SIGINT, now if the system can wake it."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:  # on Windows this wakes the main thread's waits too, which interrupt_main does not
        signal.raise_signal(signal.SIGINT)


def uninterrupted(wait: Any, *args: Any) -> Any:
    """Return `wait(*args)`; on Windows any SIGINT breaks off a wait, whatever its handler does."""
    while True:
        with contextlib.suppress(InterruptedError):
            return wait(*args)


# ---- what a rank prints


class _Messages(io.RawIOBase):
    """A stream over a pipe that is no descriptor: each write is a message."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.pipe = pipe

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data[:MESSAGE_BYTES])
        self.pipe.send_bytes(part)
        return len(part)


def print_to(pipe: connection.Connection) -> TextIO:
    """Return a stream to the pipe, which takes what children and C code print too if it can."""
    if PIPES_HAVE_DESCRIPTORS:
        os.dup2(pipe.fileno(), 1)
        os.dup2(pipe.fileno(), 2)
        return os.fdopen(1, "w", 1, encoding="utf-8", errors="replace")
    raw = io.BufferedWriter(_Messages(pipe))
    return io.TextIOWrapper(raw, "utf-8", "replace", newline="\n", line_buffering=True)


def printed(pipe: connection.Connection) -> bytes:
    """Return the next that came over such a pipe; empty at its end."""
    return os.read(pipe.fileno(), 1 << 16) if PIPES_HAVE_DESCRIPTORS else pipe.recv_bytes()


# ---- the stack of a rank whose Python gets no turn


def answer_stack_requests(path: str) -> None:
    """Have faulthandler write the main thread's stack to a file whenever it is requested."""
    if hasattr(faulthandler, "register"):
        dump = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False)


def request_stack(pid: int, path: str) -> str:
    """Return the stack that a process, when asked, adds to the file; empty if it cannot tell."""
    stack, more, until = "", "", time.monotonic() + STACK_LIMIT_S
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, signal.SIGUSR1)
            while (more or not stack) and time.monotonic() < until:
                time.sleep(0.1)
                more = file.read()
                stack += more
    return stack
