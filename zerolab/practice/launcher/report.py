"""What is said of ranks that failed or are busy: errors, tracebacks and stacks, as text.

Only the notebook has the source of its cells: ranks send frames, and here they get their lines.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterable

from zerolab.practice.launcher import host, system
from zerolab.practice.launcher.rank import Activity, Failure, Frame

MOST_FRAMES = 40  # of a stack that are shown: a recursion without end has a thousand
OWN_COLLECTIVES = os.path.join("zerolab", "practice", "comm.py")


class RankError(RuntimeError):
    """A rank failed: `rank` is its number (None if it is not one alone), `where` its traceback."""

    def __init__(self, message: str, rank: int | None = None, where: str = "") -> None:
        super().__init__(message)
        self.rank, self.where = rank, where
        if where:
            self.add_note(where)

    def _render_traceback_(
        self,
    ) -> list[str]:  # what IPython shows: the rank's frames, none of ours
        return [*self.where.splitlines(), f"{type(self).__name__}: {self}"]


class RankTimeout(RankError):
    """Ranks did not finish in time: `report` has their stacks and the collectives they wait in."""

    @property
    def report(self) -> str:
        return self.where


def said(kind: type[BaseException], sentence: str, where: str = "") -> BaseException:
    """Make an error that a notebook shows as one sentence (below `where`), without our frames."""
    error = kind(sentence)
    shown = [*where.splitlines(), f"{kind.__name__}: {sentence}"]
    error._render_traceback_ = lambda: shown  # type: ignore[attr-defined]
    return error


def seconds(value: float) -> float:
    """Return a time limit as given; raise ValueError unless it is a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise said(ValueError, f"timeout must be a number of seconds above 0, not {value!r}")
    return value


def names(ranks: Iterable[int]) -> str:
    """Write "rank 2", or "ranks 0, 1"."""
    numbers = [str(r) for r in sorted(ranks)]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def labelled(rank: int, printed: bytes, dropped_bytes: int) -> str:
    """Label each line that a rank has printed; of a progress bar, its last state is kept."""
    lines = printed.decode(errors="replace").removesuffix("\n").split("\n") if printed else []
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    if dropped_bytes:
        lines.append(f"({dropped_bytes:,} more bytes were printed; only the first are kept)")
    return "".join(f"[rank {rank}] {line}\n" for line in lines)


def exit_text(code: int) -> str:
    """Say how a process ended, from its exit code as multiprocessing gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    text = f"was killed (exit code {code})"
    with contextlib.suppress(ValueError):
        text = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    if code == -getattr(signal, "SIGSEGV", 0):
        text += ": perhaps it read a parameter that stage 3 keeps in memory only while it is used"
    if code != system.KILLED:
        return text
    if host.memory_ran_out():
        advice = "use smaller tensors or fewer ranks, or shut down other kernels"
        return f"{text}, most likely because memory ran out: {advice}"
    free = host.free_bytes() / 1e9
    return f"{text} by somebody, or by what guards this machine's memory ({free:.1f} GB are free)"


def cause(failures: dict[int, Failure | int], stopped: Iterable[int], note: str) -> RankError:
    """Make the error of a call: of a rank that died, else of one that failed by its own doing."""

    def order(r: int) -> int:
        failure = failures[r]
        return 0 if isinstance(failure, int) else 2 if failure.consequence else 1

    first, *others = sorted(failures, key=lambda r: (order(r), r))
    failure = failures[first]
    if isinstance(failure, int):
        return RankError(f"rank {first} {exit_text(failure)}{note}", first)
    text = ""
    for how, frames, message in failure.chain:
        title = f"rank {first}, last call below:\n" if frames else ""
        text += how + title + _frames_text(frames) + message
    also = {r for r in others if order(r) < 2}
    freed = {*others, *stopped} - also
    text += f"({names(also)} failed too)\n" if also else ""
    text += f"({names(freed)} stopped)\n" if freed else ""
    return RankError(f"rank {first}{failure.summary}{note}", first, text)


def activities(seen: dict[int, Activity | str]) -> tuple[str, str]:
    """Tell what ranks do, in one line and at length; one that cannot answer has a stack as text."""
    does: dict[str, list[int]] = {}
    text = ""
    for r, activity in seen.items():
        tensors = ""
        if isinstance(activity, str):
            short, stack = "in C code that keeps Python from answering", activity
        elif activity.frames is None:
            short, stack = "done", ""
        else:
            stack = _frames_text(activity.frames)
            short = _doing(activity.frames)
            if activity.pending:
                name, given = activity.pending[-1]
                short, tensors = f"waiting in {name}", f" ({given})"
        does.setdefault(short, []).append(r)
        text += f"rank {r}: {short}{tensors}\n{stack}"
    return "; ".join(f"{names(ranks)} {short}" for short, ranks in does.items()), text


def _doing(frames: list[Frame]) -> str:
    """What the last frames are about; the course's own collectives by their names."""
    if not frames:
        return "running"
    ours = [name for file, _, name, *_ in frames if file.endswith(OWN_COLLECTIVES)]
    if not frames[-1][0].endswith(OWN_COLLECTIVES):
        return f"running {frames[-1][2]}"
    return "waiting for other ranks" if ours[0] in ("wait", "finish") else f"waiting in {ours[0]}"


def _frames_text(frames: list[Frame]) -> str:
    text = ""
    half, left_out = MOST_FRAMES // 2, len(frames) - MOST_FRAMES
    for place, (file, line, name, end_line, column, end_column) in enumerate(frames):
        if left_out > 0 and half <= place < half + left_out:
            text += f"  ({left_out} more calls)\n" if place == half else ""
            continue
        frame = traceback.FrameSummary(
            file, line, name, end_lineno=end_line, colno=column, end_colno=end_column
        )
        header, *source = traceback.format_list([frame])[0].splitlines(keepends=True)
        cell = _cell_name(file)
        text += "".join([f"  {cell}, line {line}, in {name}\n" if cell else header, *source])
    return text


def _cell_name(file: str) -> str | None:
    """Return "Cell In[3]" for the file name that IPython, or %%ranks, gave to that cell."""
    if file.startswith("<Cell In["):
        return file.strip("<>")
    with contextlib.suppress(Exception):
        return " ".join(sys.modules["IPython"].get_ipython().compile.format_code_name(file))
    return None
