"""How ranks come to be and end: the server they are forked from, their folder, room and pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerolab.practice.launcher import host, system
from zerolab.practice.launcher import rank as rank_side
from zerolab.practice.launcher.rank import Pipes, Setup

PRELOAD = (
    "zerolab.practice.launcher.private_net",  # first: it needs a process with one thread
    "torch",
    "torch.distributed",
    "cloudpickle",
    "psutil",
    "zerolab.practice.launcher.host",
    "zerolab.practice.launcher.rank",
)
OUTPUT_LIMIT_BYTES = 1_000_000  # of a rank's printing that are kept in each call


def start_method() -> str:
    """Return "forkserver" on Linux, and "spawn" elsewhere or if ZEROLAB_START_METHOD says so."""
    spawn = sys.platform != "linux" or os.environ.get("ZEROLAB_START_METHOD") == "spawn"
    return "spawn" if spawn else "forkserver"


def launched() -> bool:
    """Say whether torchrun or srun made this process a rank; a notebook's kernel never is one."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    if kernel is not None and kernel.IPKernelApp.initialized():
        return False
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1")
    by_srun = "SLURM_PROCID" in os.environ and tasks.isdecimal() and int(tasks) > 1
    return by_srun or all(os.environ.get(n, "").isdecimal() for n in ("RANK", "WORLD_SIZE"))


def start_server() -> None:
    """Start the server that ranks are forked from, and return while it loads torch.

    Does nothing where ranks are spawned, where the server runs already, and on a rank. The server
    computes nothing: ranks forked after a parallel operation would hang in their own.
    """
    if start_method() == "forkserver" and not rank_side.is_rank() and not launched():
        from multiprocessing import forkserver

        multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
        with host.sockets_in(host.private_folder()), system.large_pages(), no_stop():
            forkserver.ensure_running()  # Stop is ignored in the new process, too


def make_folder() -> str:
    """Make a folder for one world, that only this user can enter."""
    return tempfile.mkdtemp(prefix="world-", dir=host.private_folder())


def room(size: int) -> host.Room:
    """Return how many ranks fit here, and why not more."""
    from multiprocessing import forkserver

    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    return host.room(size, start_method(), server)


@dataclass
class Link:
    """The notebook's ends of a rank's pipes, and its process."""

    process: Any  # a multiprocessing process of either start method
    pipes: Pipes
    setup: Setup
    heard: bytearray = field(default_factory=bytearray)  # printed by the rank and not shown yet
    dropped_bytes: int = 0  # printed beyond OUTPUT_LIMIT_BYTES
    torn: bool = False  # a message may have gone over the pipe in part only

    def listen(self) -> None:
        """Take what the rank has printed so far."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipes.output.poll(0) and (data := system.printed(self.pipes.output)):
                kept = data[: max(0, OUTPUT_LIMIT_BYTES - len(self.heard))]
                self.heard += kept
                self.dropped_bytes += len(data) - len(kept)

    def stack_by_signal(self) -> str:
        """Return the stack of a rank whose watchdog gets no turn, as faulthandler writes it."""
        dump = system.request_stack(self.process.pid, self.setup.stack_file)
        frames = dump.rpartition("first):\n")[2].partition(f'  File "{rank_side.__file__}"')[0]
        return "".join(reversed(frames.splitlines(keepends=True)))

    def end(self, wait_s: float) -> None:
        """End the rank, by force after `wait_s`, and close its pipes."""
        self.pipes.commands.close()  # end of file: it leaves by itself
        if self.process.pid is not None:
            self.process.join(wait_s)
            if self.process.exitcode is None:
                self.process.kill()
                self.process.join(5)
        for pipe in (self.pipes.control, self.pipes.output, self.pipes.life):
            pipe.close()


def start_rank(setup: Setup) -> Link:
    """Start a process for one rank; if Stop comes in between, none is left."""
    context: Any = multiprocessing.get_context(start_method())
    commands, its_commands = context.Pipe()
    control, its_control = context.Pipe()
    output, its_output = context.Pipe(duplex=False)
    its_life, life = context.Pipe(duplex=False)
    its = Pipes(its_commands, its_control, its_output, its_life)
    process = context.Process(target=rank_side.main, args=(setup, its))
    link = Link(process, Pipes(commands, control, output, life), setup)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # or the rank would run a script again
    try:
        process.start()
    except BaseException:
        link.end(0.0)
        raise
    finally:
        sys.modules["__main__"] = main
        for pipe in (its_commands, its_control, its_output, its_life):
            pipe.close()
    return link


def end_all(links: dict[int, Link], folder: str, owner: int) -> None:
    """End the ranks and remove their folder; a fork of the process `owner` leaves both alone."""
    if os.getpid() == owner:
        for link in links.values():
            link.pipes.commands.close()
        until = time.monotonic() + 1
        for link in links.values():
            link.end(max(0.0, until - time.monotonic()))
        links.clear()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def stop_handler(handler: Any) -> Iterator[None]:
    """Answer Stop in another way for a while, where this is the thread that Stop reaches."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


def no_stop() -> contextlib.AbstractContextManager[None]:
    """Ignore Stop while ranks are put right, which takes seconds at most."""
    return stop_handler(signal.SIG_IGN)


@contextlib.contextmanager
def late_stop() -> Iterator[None]:
    """Hold Stop back until a message is over; pressed a second time, it comes through."""
    pressed: list[int] = []

    def hold(number: int, _: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    try:
        with stop_handler(hold):
            yield
    finally:
        if pressed:
            signal.raise_signal(signal.SIGINT)
