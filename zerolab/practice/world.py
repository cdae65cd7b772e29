"""The notebook's side of the ranks: a World of processes beside it that run its functions.

    with World(4) as world:
        losses = world.run(train_step, batch)  # a list by rank; train_step may be a cell's
        world.inspect("loss.item()")  # reads the ranks' own variables

The ranks are forked from a server that has loaded torch already (macOS, Windows: each loads it).
Functions travel by cloudpickle over inherited pipes: nothing listens on the network but gloo, on
the loopback. Under torchrun or srun this process is a rank itself: World attaches to their group.

No torch is imported here: a notebook that only runs ranks need not wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import operator
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import connection
from typing import Any

from zerolab.practice.launcher import launch, report, system
from zerolab.practice.launcher import rank as rank_side
from zerolab.practice.launcher.attached import Attached
from zerolab.practice.launcher.launch import start_server
from zerolab.practice.launcher.rank import Activity, Failure, Setup
from zerolab.practice.launcher.report import RankError, RankTimeout, said
from zerolab.practice.toy import Toy

__all__ = ["Attached", "RankError", "RankTimeout", "World", "start_server"]

START_LIMIT_S = 120.0  # for new ranks to form their group
GRACE_S = 0.2  # for other ranks to report errors of their own, after one that failed by itself
STOP_LIMIT_S = 3.0  # for a rank to leave what it runs; after that it is restarted
LOOK_LIMIT_S = 1.0  # for a watchdog to answer
WAIT_S = 0.2  # for ranks, at a stretch: on Windows Stop does not wake a notebook that waits
Outcome = bytes | Failure | int  # of a call on a rank: pickled value, what went wrong, exit code
_ages = itertools.count()
_worlds: weakref.WeakValueDictionary[int, World] = weakref.WeakValueDictionary()  # oldest first


class World:
    """`size` ranks in one process group, each with variables of its own, until the world is closed.

    `timeout` limits each call, in seconds. `check=True` has torch compare op, shape and dtype of
    each collective over the ranks: a mistake is an exact error and not a hang or a wrong result, at
    several times the latency (torch 2.13: DDP crashes under it). `threads` are torch's, on each
    rank. `backend` "auto" is nccl where there are GPUs enough, else gloo. A rank starts with
    torch.manual_seed(rank).

    `device_memory` ("64 MB"), `link` ("100 MB/s") and `latency` ("50 us") are emulated: each rank
    refuses what its device cannot hold, and the collectives of `zerolab.practice.comm` take as long
    as on such a link.

    Raises TypeError or ValueError for what makes no world, RankError if ranks cannot start.
    """

    private = False  # kept by the course for itself: %%ranks passes it over

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        by_launcher = launch.launched() and not rank_side.is_rank()
        return Attached(*args, **kwargs) if by_launcher else super().__new__(cls)

    def __init__(
        self,
        size: int,
        timeout: float = 60,
        check: bool = False,
        threads: int = 1,
        backend: str = "auto",
        device_memory: float | str | None = None,
        link: float | str | None = None,
        latency: float | str | None = None,
    ) -> None:
        if rank_side.is_rank():
            raise said(RuntimeError, "a rank cannot make a World: make it in the notebook")
        for name, number in (("size", size), ("threads", threads)):
            if isinstance(number, bool) or not isinstance(number, int):
                sentence = f"{name} must be a whole number, as in World(4), not {number!r}"
                raise said(TypeError, sentence)
            if number < 1:
                raise said(ValueError, f"{name} must be at least 1, not {number}: try World(4)")
        if backend not in ("auto", "gloo", "nccl"):
            raise said(ValueError, f"backend must be 'auto', 'gloo' or 'nccl', not {backend!r}")
        self.size, self.timeout = size, report.seconds(timeout)
        try:
            toy = Toy.read(device_memory, link, latency)
        except ValueError as error:
            raise said(ValueError, str(error)) from None
        self._choices = (threads, backend, check, toy)
        room = launch.room(size)
        if size > room.fit:
            most = f"at most {room.fit} do" if room.fit > 0 else "not even one does"
            advice = f"make fewer, or {room.advice}" if room.fit > 0 else room.advice
            sentence = f"{size} ranks do not fit, {most}: {room.why}; {advice}"
            raise said(ValueError, sentence)
        self._links: dict[int, launch.Link] = {}
        self._serial = 0  # of the last command; answers to earlier ones are ignored
        self._asked = 0  # of the last question to the watchdogs, likewise
        self._joined: dict[str, Any] = {}  # what the ranks said of their group
        self._unsettled = True  # a command may still run on a rank
        start_server()
        self._folder = launch.make_folder()
        self._end = weakref.finalize(self, launch.end_all, self._links, self._folder, os.getpid())
        try:
            self._form_group()
        except BaseException as error:
            self.close()
            if isinstance(error, KeyboardInterrupt):
                raise said(KeyboardInterrupt, "stopped before the ranks were ready") from None
            raise
        _worlds[next(_ages)] = self

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on each rank (of `ranks`); return the results in that order.

        The function is sent by value; what it keeps goes into `namespace()` of
        `zerolab.practice.launcher.rank`. What ranks print is shown when the call ends, in rank
        order, up to 1 MB a rank. After an error the world is usable and variables are kept; groups
        besides the default one are gone.

        Raises TypeError for what cannot be sent, RankError for a rank that failed, RankTimeout
        after `timeout` seconds (the world's own by default).
        """
        if not callable(fn):
            raise said(TypeError, f"run takes a function, as in run(step, batch), not {fn!r}")
        try:
            sent = rank_side.dumps((fn, args, kwargs))
        except Exception as error:
            what = getattr(fn, "__name__", type(fn).__name__)
            advice = "make such objects inside the function"
            sentence = f"{what} cannot be sent to the ranks ({error}): {advice}"
            raise said(TypeError, sentence) from None
        return self._call("call", sent, ranks, timeout)

    def inspect(self, expr: str, ranks: Iterable[int] | None = None) -> list[Any]:
        """Evaluate an expression over each rank's own variables; raises as `run` does."""
        if not isinstance(expr, str):
            raise said(TypeError, f"inspect takes text, as in inspect('loss'), not {expr!r}")
        return self._call("inspect", expr, ranks, None)

    def run_cell(self, source: str, name: str, ranks: Iterable[int] | None = None) -> None:
        """Run source text among each rank's own variables; `name` stands for its file."""
        self._call("cell", (source, name), ranks, None)

    def where(self, ranks: Iterable[int] | None = None) -> str:
        """Tell what each rank is doing: its stack, and the collective that it waits in."""
        return self._look(self._which(ranks))[1]

    def restart(self) -> None:
        """Start all ranks anew, without variables; changed modules and os.environ reach them."""
        self._which(None)
        self._unsettled = True
        with launch.no_stop():
            for link in self._links.values():
                link.end(1.0)
            self._links.clear()
        self._form_group()

    def close(self) -> None:
        """End the ranks, for good; it also happens when the notebook ends."""
        with launch.no_stop():
            self._end()

    @property
    def private_ports(self) -> bool:
        """False where other users of this machine can reach the ranks' ports."""
        return bool(self._joined.get("private_ports"))

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"World({self.size}){', closed' if self.closed else ''}"

    def __reduce__(self) -> Any:
        raise TypeError("a World stays in the notebook; ranks use torch.distributed")

    # ---- a call, from the command to the results

    def _which(self, ranks: Iterable[int] | None) -> list[int]:
        if self.closed:
            raise said(RuntimeError, "this world is closed: make a new one, as in World(4)")
        if ranks is None:
            return list(range(self.size))
        try:
            chosen = [operator.index(r) for r in ranks]
        except TypeError:
            chosen = []
        if not chosen or len({*chosen} & {*range(self.size)}) < len(chosen):
            numbers = f"different numbers from 0 to {self.size - 1}"
            raise said(ValueError, f"ranks must be a list of {numbers}, not {ranks!r}")
        return chosen

    def _call(
        self, kind: str, body: Any, ranks: Iterable[int] | None, timeout: float | None
    ) -> list[Any]:
        """Run one command on ranks; whatever happens, leave behind ranks ready for the next one."""
        chosen = self._which(ranks)
        limit_s = self.timeout if timeout is None else report.seconds(timeout)
        self._settle()
        answers: dict[int, Outcome] = {}
        stopped, self._unsettled = False, True
        try:
            self._send(kind, body, chosen)
            self._collect(answers, chosen, limit_s, GRACE_S)
        except (KeyboardInterrupt, InterruptedError):
            stopped = True
        with launch.no_stop():
            late = [r for r in chosen if r not in answers]
            failures = {r: a for r, a in answers.items() if not isinstance(a, bytes)}
            short = stacks = note = ""
            if stopped or (late and not failures):
                short, stacks = self._look(chosen)
            if stopped or late or failures:
                note = self._regroup(late)
            self._show()
            self._unsettled = False
        if stopped:
            raise said(KeyboardInterrupt, f"stopped: {short}{note}", stacks)
        if failures:
            raise report.cause(failures, late, note)
        if late:
            raise RankTimeout(f"not finished after {limit_s:g} s: {short}{note}", where=stacks)
        try:
            return [pickle.loads(answers[r]) for r in chosen]  # type: ignore[arg-type]
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise said(RankError, f"a result cannot be loaded in the notebook: {why}") from None

    def _settle(self) -> None:
        """Replace ranks that died while nothing ran; finish what a second Stop left undone."""
        codes = {r: link.process.exitcode for r, link in self._links.items()}
        dead = [r for r in codes if codes[r] is not None]
        if dead or self._unsettled:
            with launch.no_stop():
                note = self._regroup(self._links)
        if dead:
            end = report.exit_text(codes[dead[0]])
            raise RankError(f"rank {dead[0]} {end}{note}", dead[0])

    def _send(self, kind: str, body: Any, ranks: Iterable[int]) -> None:
        self._serial += 1
        message = pickle.dumps((self._serial, kind, body))
        with launch.late_stop():
            for link in [self._links[r] for r in ranks]:
                link.torn = True
                with contextlib.suppress(OSError):  # it died: its answer will tell
                    link.pipes.commands.send_bytes(message)
                link.torn = False

    def _collect(
        self, answers: dict[int, Outcome], ranks: Iterable[int], limit_s: float, grace_s: float
    ) -> dict[int, Outcome]:
        """Fill in and return the answers to the last command, until `grace_s` after a failure."""
        waiting, until = set(ranks), time.monotonic() + limit_s
        while waiting and (left_s := until - time.monotonic()) > 0:
            sources: dict[Any, int] = {}
            for r in waiting:
                link = self._links[r]
                sources |= {link.pipes.commands: r, link.pipes.output: r, link.process.sentinel: r}
            wait_s = min(left_s, WAIT_S)
            for r in {sources[ready] for ready in connection.wait(list(sources), wait_s)}:
                answer = self._answer(self._links[r])
                if answer is not None:
                    answers[r] = answer
                    waiting.discard(r)
                    if not isinstance(answer, bytes):
                        of_another = isinstance(answer, Failure) and answer.consequence
                        more_s = STOP_LIMIT_S if of_another else grace_s
                        until = min(until, time.monotonic() + more_s)
        return answers

    def _answer(self, link: launch.Link) -> Outcome | None:
        """Take a rank's answer to the last command, or its exit code; None if neither is there."""
        link.listen()
        with contextlib.suppress(EOFError, OSError):
            while link.pipes.commands.poll(0):
                with launch.late_stop():
                    link.torn = True
                    serial, answer = pickle.loads(link.pipes.commands.recv_bytes())
                    link.torn = False
                if serial == self._serial:
                    return answer
            if link.process.exitcode is None:
                return None
        link.process.join(STOP_LIMIT_S)
        return link.process.exitcode if link.process.exitcode is not None else system.KILLED

    def _show(self) -> None:
        """Print what the ranks have printed, in rank order."""
        text = ""
        for r, link in sorted(self._links.items()):
            link.listen()
            text += report.labelled(r, bytes(link.heard), link.dropped_bytes)
            link.heard.clear()
            link.dropped_bytes = 0
        if text:
            sys.stdout.write(text)

    # ---- ranks that are busy, and how they come back

    def _look(self, ranks: Iterable[int]) -> tuple[str, str]:
        """Return what ranks are doing, in one line and at length."""
        seen = self._ask_watchdogs("look", ranks)
        stacks = {r: seen.get(r) or self._links[r].stack_by_signal() for r in ranks}
        return report.activities(stacks)

    def _ask_watchdogs(self, what: str, ranks: Iterable[int]) -> dict[int, Activity]:
        self._asked += 1
        waiting: dict[Any, int] = {self._links[r].pipes.control: r for r in ranks}
        for control in waiting:
            with contextlib.suppress(OSError):
                control.send((self._asked, what, self._serial))
        answers: dict[int, Activity] = {}
        until = time.monotonic() + LOOK_LIMIT_S
        while waiting and (left_s := until - time.monotonic()) > 0:
            ready: list[Any] = connection.wait(list(waiting), left_s)
            for control in ready:
                try:
                    number, activity = control.recv()
                    if number == self._asked:
                        answers[waiting.pop(control)] = activity
                except (EOFError, OSError):
                    del waiting[control]  # it died
        return answers

    def _regroup(self, busy: Iterable[int]) -> str:
        """Get all ranks into a new group, busy ones too; restart those that do not follow."""
        self._ask_watchdogs("stop", busy)  # an answer says that it is done
        whole = [r for r, link in self._links.items() if not link.torn]
        self._send("leave", None, whole)
        answers = self._collect({}, whole, STOP_LIMIT_S, STOP_LIMIT_S)
        lost = [r for r in self._links if not isinstance(answers.get(r), bytes)]
        self._show()
        for r in lost:
            self._links[r].end(0.0)
        self._form_group()
        return f"; {report.names(lost)} restarted without variables" if lost else ""

    def _form_group(self) -> None:
        """Start the ranks that are missing and have all form a group; if they cannot, close."""
        for r in range(self.size):
            if r not in self._links or self._links[r].process.exitcode is not None:
                setup = Setup(r, self.size, *self._choices, self._folder, dict(os.environ))
                try:
                    self._links[r] = launch.start_rank(setup)
                except (EOFError, OSError) as error:
                    self.close()
                    why = f"{type(error).__name__}: {error}"
                    advice = "memory or processes ran out; zerolab doctor says what is there"
                    raise said(RankError, f"rank {r} cannot start ({why}): {advice}") from None
        self._send("join", os.path.join(self._folder, f"group{self._serial}"), self._links)
        answers = self._collect({}, self._links, START_LIMIT_S, GRACE_S)
        bad = [r for r in self._links if not isinstance(answers.get(r), bytes)]
        if bad:
            first = min(bad, key=lambda r: (r not in answers, r))
            failure = answers.get(first)
            why = getattr(failure, "summary", f" was not ready after {START_LIMIT_S:g} s")
            if isinstance(failure, int):
                why = f" {report.exit_text(failure)}"
            self.close()
            raise said(RankError, f"the ranks cannot form a group: rank {first}{why}")
        self._joined = pickle.loads(answers[0])  # type: ignore[arg-type]
        self._unsettled = False


@atexit.register  # runs before multiprocessing waits for its processes, as it is registered later
def _close_worlds() -> None:
    for world in list(_worlds.values()):
        world.close()


def latest_world() -> World | None:
    """Return the youngest open world that the notebook made."""
    mine = [w for _, w in sorted(_worlds.items()) if not (w.closed or w.private)]
    return mine[-1] if mine else None
