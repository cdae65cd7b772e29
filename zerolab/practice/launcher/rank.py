"""The rank's own side of a World: what one process of the group does, from its start to its end.

A rank is a process beside the notebook. Its main thread waits for a command on a pipe, runs it, and
answers on the same pipe. A second thread, the watchdog, answers on another pipe while the main
thread is busy: it tells where the main thread is, or gets it out of there. When the notebook is
gone, the watchdog's end of file ends the rank, or a signal does, even while C code holds the GIL.

torch is imported inside functions only: the notebook imports this module too, and need not wait.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import io
import marshal
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle

from zerolab.practice import toy
from zerolab.practice.launcher import system
from zerolab.practice.launcher.group import (
    forget_what_was_stopped,
    join_group,
    leave_group,
    pending_since,
    shut_connections,
)
from zerolab.practice.toy import Toy

HIDDEN_FILE = os.path.join(
    "torch", "distributed", "c10d_logger.py"
)  # it wraps each collective, and says nothing
BROKEN_CONNECTION = (  # in an error's text: it follows from what happened on another rank
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "communicator was aborted",
)
Frame = tuple[str, int | None, str, int | None, int | None, int | None]
# file, line, name of the function, then end line, first and last column


@dataclass(frozen=True)
class Setup:
    """What a rank is told at its start."""

    rank: int
    size: int
    threads: int  # torch's, on this rank
    backend: str  # "auto", "gloo" or "nccl"
    check: bool  # compare op, shape and dtype of each collective over the ranks
    toy: Toy  # a device and a link, emulated
    folder: str  # this world's, private
    environ: dict[str, str]  # the notebook's, now

    @property
    def stack_file(self) -> str:
        return os.path.join(self.folder, f"stack{self.rank}")


@dataclass(frozen=True)
class Pipes:
    """One side's ends of the pipes between the notebook and a rank."""

    commands: Connection  # for the main thread
    control: Connection  # for the watchdog
    output: Connection  # what the rank prints
    life: Connection  # nothing is written to it; it ends when the notebook does


@dataclass(frozen=True)
class Failure:
    """Why a call failed, in parts: only the notebook can add the source lines of its cells."""

    summary: str  # follows "rank 2"
    chain: list[
        tuple[str, list[Frame], str]
    ]  # how it came up, frames, message; the first error first
    consequence: bool  # another rank's failure, or Stop, made this one


@dataclass(frozen=True)
class Activity:
    """What a rank was doing when its watchdog was asked."""

    frames: list[Frame] | None  # None: it runs nothing
    pending: list[tuple[str, str]]  # collectives not done: name and number, dtype and shape


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with code that remembers its file or cell (3.1.3 gives all code one name)."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {types.CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}
    )


def dumps(value: object) -> bytes:
    """Pickle `value` with all that it refers to, functions and classes of cells included."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


_namespace: dict[str, Any] | None = None
_folder: str | None = None


def namespace() -> dict[str, Any]:
    """Return this rank's own variables, which stay from call to call.

    A %%ranks cell runs among them and `World.inspect` reads them; RANK and WORLD_SIZE are there
    from the start. Raises RuntimeError in a process that is no rank.
    """
    if _namespace is None:
        raise RuntimeError("namespace() is for functions that run on a rank, as in world.run(fn)")
    return _namespace


def begin_namespace(rank: int, size: int) -> dict[str, Any]:
    """Make this process a rank, with variables of its own."""
    global _namespace
    _namespace = {"__name__": "__main__", "RANK": rank, "WORLD_SIZE": size}
    return _namespace


def is_rank() -> bool:
    """Say whether this process is a rank."""
    return _namespace is not None


def folder() -> str | None:
    """The world's private folder, which goes when the world closes; None under a launcher."""
    return _folder


def run_cell(source: str, name: str, variables: dict[str, Any]) -> None:
    """Run the text of a cell; as in a notebook, the value of a last expression is printed."""
    body, last = ast.parse(source, name).body, []
    if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last.append(body.pop())
    exec(compile(ast.Module(body, type_ignores=[]), name, "exec"), variables)
    exec(compile(ast.Interactive(last), name, "single"), variables)


# ---- errors, stacks and pending collectives ------------------------------------------------------


def _user_frames(stack: Iterable[traceback.FrameSummary]) -> list[Frame]:
    """Return the frames of what the rank was asked to run: those below the last of this file."""
    frames: list[Frame] = []
    for f in stack:
        if f.filename == __file__:
            frames.clear()
        elif not f.filename.endswith(HIDDEN_FILE):
            frames.append((f.filename, f.lineno, f.name, f.end_lineno, f.colno, f.end_colno))
    return frames


def _failure(error: BaseException) -> Failure:
    """Take apart an error that a call raised, with the errors that led to it."""
    summary = ": " + "".join(traceback.format_exception_only(error)).strip()
    consequence = any(words in summary for words in BROKEN_CONNECTION)
    if isinstance(error, SystemExit):
        summary = f" called exit with code {error.code or 0}: end its function with return instead"
    chain: list[tuple[str, list[Frame], str]] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 10:
        before, how = link.__cause__, "\nThis error was the direct cause of the next one:\n\n"
        if before is None:
            before = None if link.__suppress_context__ else link.__context__
            how = "\nWhile this error was handled, another one came up:\n\n"
        message = "".join(traceback.format_exception_only(link))
        frames = _user_frames(traceback.extract_tb(link.__traceback__))
        chain.append((how if before else "", frames, message))
        link = before
    return Failure(summary, chain[::-1], consequence or isinstance(error, KeyboardInterrupt))


# ---- the rank ------------------------------------------------------------------------------------


class Rank:
    """One rank: its variables, and the loop that serves the notebook."""

    def __init__(self, setup: Setup, pipes: Pipes) -> None:
        self.setup, self.pipes = setup, pipes
        self.variables = begin_namespace(setup.rank, setup.size)
        self.calling = False  # the main thread runs the learner's code
        self.began_ns = time.time_ns()  # the last command
        self.cancelled = 0  # the last command that Stop was pressed for; it may not have begun
        self.stop: KeyboardInterrupt | None = None  # the last

    def serve(self) -> NoReturn:
        """Answer one command after the other until the notebook closes the pipe."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = system.uninterrupted(self.pipes.commands.recv_bytes)
                serial, kind, body = pickle.loads(message)
                try:
                    answer = self.answer(serial, kind, body)
                except KeyboardInterrupt as error:  # Stop came just as the call ended
                    answer = _failure(error)
                message = pickle.dumps((serial, answer))
                system.uninterrupted(self.pipes.commands.send_bytes, message)
        end()

    def answer(self, serial: int, kind: str, body: Any) -> bytes | Failure:
        """Carry out one command; return its pickled value, or what went wrong."""
        self.began_ns, self.calling = time.time_ns(), kind not in ("join", "leave")
        doing = "cannot load what was sent to it"
        try:
            if serial <= self.cancelled:
                raise KeyboardInterrupt
            work = self.prepare(kind, body)
            doing = ""
            forget_what_was_stopped()
            with toy.device():
                value = work()
            doing = f"gave back a {type(value).__name__}, which cannot be sent"
            return dumps(value)
        except BaseException as error:
            self.calling = False
            shut_connections()  # peers that wait for this rank in a collective fail at once
            failure = _failure(error)
            if doing and not failure.consequence:
                return Failure(f" {doing} ({type(error).__name__}: {error})", [], False)
            return failure
        finally:
            self.calling = False
            _flush()

    def prepare(self, kind: str, body: Any) -> Callable[[], object]:
        """Turn a command into what is to be run."""
        if kind == "call":
            function, args, kwargs = pickle.loads(body)
            return lambda: function(*args, **kwargs)
        if kind == "cell":
            source, name = body
            return lambda: run_cell(source, name, self.variables)
        if kind == "inspect":
            code = body.strip()
            return lambda: eval(compile(code, "<inspect>", "eval"), self.variables)
        if kind == "leave":
            shut_connections()
            return leave_group
        s = self.setup
        return lambda: join_group(s.backend, s.check, s.rank, s.size, body)

    def on_stop(self, *_: object) -> None:
        """Stop the learner's code, once in a call, and nothing else; SIGINT from the watchdog."""
        if self.calling:
            self.calling = False
            self.stop = KeyboardInterrupt()
            raise self.stop

    def on_unraisable(self, lost: Any) -> None:
        """Stop again, in a moment: a stop that meets an object as it is finalized is lost there."""
        if lost.exc_value is None or lost.exc_value is not self.stop:
            sys.__unraisablehook__(lost)
            return
        self.calling = True
        threading.Timer(0.01, system.interrupt_main_thread).start()

    def watch(self) -> None:
        """Be the watchdog: answer while the main thread is busy, and end with the notebook."""
        main_thread = threading.main_thread().ident or 0
        with contextlib.suppress(EOFError, OSError):
            while True:
                question, what, command = self.pipes.control.recv()
                stack = traceback.extract_stack(sys._current_frames()[main_thread])
                frames = _user_frames(stack) if self.calling else None
                activity = Activity(frames, pending_since(self.began_ns))
                if what == "stop":
                    self.cancelled = command
                    shut_connections()
                    system.interrupt_main_thread()
                self.pipes.control.send((question, activity))
        end()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def end() -> NoReturn:
    """End this rank without tearing gloo down, which now and then aborts the process."""
    _flush()
    os._exit(0)


def main(setup: Setup, pipes: Pipes) -> NoReturn:
    """Be a rank: called in the new process, never returns."""
    global _folder
    _folder = setup.folder
    system.leave_session()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    system.end_with(pipes.life)
    if pipes.life.poll(0):  # it closed before the guard stood
        end()
    sys.stdout = sys.stderr = system.print_to(pipes.output)
    rank, size = str(setup.rank), str(setup.size)
    os.environ.update(setup.environ, RANK=rank, LOCAL_RANK=rank)
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ["GLOO_SOCKET_IFNAME"] = system.loopback()
    faulthandler.enable(file=2)
    system.answer_stack_requests(setup.stack_file)  # if the watchdog cannot
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about new names

    import torch

    gc.freeze()
    system.keep_freed_memory()
    torch.set_num_threads(setup.threads)
    torch.manual_seed(setup.rank)
    toy.here = setup.toy
    this = Rank(setup, pipes)
    signal.signal(signal.SIGINT, this.on_stop)
    sys.unraisablehook = this.on_unraisable
    threading.Thread(target=this.watch, daemon=True).start()
    this.serve()
