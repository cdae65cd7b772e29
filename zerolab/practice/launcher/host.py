"""What a machine that many share still allows, and what is left on it: memory, processes, folders.

A learner's process keeps everything of its worlds in one private folder, which holds a lock as long
as the process lives. The ranks' server, the last to leave, removes it; if that was killed too, the
next world of the same user does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import util

import psutil

from zerolab.practice.launcher import private_net, system

GROUPS, MEMBERSHIP = "/sys/fs/cgroup", "/proc/self/cgroup"  # control groups, of both versions
FOLDER = "ZEROLAB_FOLDER"  # tells the ranks' server which folder goes with it
RANK_BYTES = {"forkserver": 67_000_000, "spawn": 170_000_000}  # a rank that has trained, measured
SERVER_BYTES = 150_000_000  # of the ranks' server once torch is loaded, measured
RANK_FILES = 8  # open files that a rank costs the notebook
RANK_TASKS = 8  # a rank's process and its threads: 5, with check=True or a second group 8
RANK_WAITS = 3  # what the notebook waits for, of a rank: its answer, its printing, its end
LONGEST_SOCKET = 107  # bytes in the name of a socket in a folder: linux/un.h


# ---- how many ranks fit


@dataclass(frozen=True)
class Room:
    """How many ranks one of the machine's limits allows, and what is said of it."""

    fit: int
    why: str
    advice: str


def room(size: int, method: str, server_pid: int | None) -> Room:
    """The narrowest of what limits the number of ranks, for a world that wants `size` of them."""
    memory_ran_out()  # what happened before is no news
    free, own = free_bytes(), RANK_BYTES[method]
    to_come = SERVER_BYTES - _loaded_bytes(server_pid) if method == "forkserver" else 0
    to_come = max(0, to_come)
    need = f"they need about {(size * own + to_come) / 1e9:.2f} GB of memory"
    others = "close other worlds or shut down other kernels"
    rooms = [Room((free - to_come) // own, f"{need}, and {free / 1e9:.2f} GB are free", others)]
    if (files := system.files_left()) is not None:
        why = f"they need {size * RANK_FILES} more open files, and {files} are allowed"
        rooms.append(Room(files // RANK_FILES, why, "raise the limit (ulimit -n)"))
    if (tasks := tasks_left()) is not None:
        why = f"they need about {size * RANK_TASKS} more processes and threads, and {tasks}"
        rooms.append(Room(tasks // RANK_TASKS, f"{why} are allowed", others))
    if not system.PIPES_HAVE_DESCRIPTORS:
        most = system.MOST_WAITED_FOR
        why = f"this system waits for {most} things at once"
        rooms.append(Room(most // RANK_WAITS, why, "use Linux"))
    return min(rooms, key=lambda each: each.fit)


def _loaded_bytes(pid: int | None) -> int:
    """Memory of its own that a process has by now; 0 where it is not there yet."""
    if pid is None:
        return 0
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return memory.rss - getattr(memory, "shared", 0)


def free_bytes() -> int:
    """Return the memory left on this machine and in our control groups."""
    free = [psutil.virtual_memory().available]
    for group in _control_groups("memory"):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _number(f"{group}/{limit}"), _number(f"{group}/{used}")
            if most is not None and now is not None:
                free.append(most - now + (_number(f"{group}/memory.stat", cache) or 0))
    return max(0, min(free))


def tasks_left() -> int | None:
    """How many more processes and threads this user, or our control group, may have."""
    left = []
    for group in _control_groups("pids"):
        most, now = _number(f"{group}/pids.max"), _number(f"{group}/pids.current")
        if most is not None and now is not None:
            left.append(most - now)
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if most != resource.RLIM_INFINITY and (user := os.getuid()) != 0:  # root has no limit
            mine = (p.info for p in psutil.process_iter(["uids", "num_threads"]))
            left.append(most - sum(i["num_threads"] or 0 for i in mine
                                   if i["uids"] and i["uids"].real == user))  # fmt: skip
    return max(0, min(left)) if left else None


def _control_groups(controller: str) -> Iterator[str]:
    """Folders of the control groups that limit this process, its own first."""
    lines: list[str] = []
    with contextlib.suppress(OSError), open(MEMBERSHIP) as file:
        lines = file.read().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = f"{GROUPS}/{controller}" if controllers else GROUPS
            group = os.path.normpath(root + path)
            while group.startswith(root):
                yield group
                group = os.path.dirname(group)


def _number(path: str, name: str = "") -> int | None:
    """The number in a file, or in its line of that name; None if there is none ("max")."""
    with contextlib.suppress(OSError), open(path) as file:
        found = re.search(rf"^{name} ?(\d+)$", file.read(), re.MULTILINE)
        return int(found[1]) if found else None
    return None


# ---- memory that ran out


def _ended_for_memory() -> int:
    """How many processes the system has ended since it began, as memory ran out."""
    ended = [_number("/proc/vmstat", "oom_kill") or 0]
    for group in _control_groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            ended.append(_number(f"{group}/{name}", "oom_kill") or 0)
    return sum(ended)


_ended_before = 0


def memory_ran_out() -> bool:
    """Whether the system has ended a process for want of memory since the last time of asking."""
    global _ended_before
    before, _ended_before = _ended_before, _ended_for_memory()
    return _ended_before > before


# ---- the private folder


_folder: tuple[int, str] | None = None  # whose it is, and where
_lock: int | None = None  # an open file; the system frees the lock when the process ends


def private_folder() -> str:
    """This process's folder, that only this user can enter; made, and others swept, at first use.

    It is not on a shared disk if the system has a place of its own for what runs.
    """
    global _folder, _lock
    if _folder is None or _folder[0] != os.getpid() or not os.path.isdir(_folder[1]):
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if not (os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)):
            base = tempfile.gettempdir()
        sweep(base)
        made = tempfile.mkdtemp(prefix=".zerolab-", dir=base)
        with contextlib.suppress(OSError):  # some network disks have no locks
            _lock = _locked(os.path.join(made, "lock"), os.O_CREAT | os.O_RDWR)
        where = os.path.join(base, f"{_prefix()}{os.getpid()}-{made.rpartition('-')[2]}")
        os.rename(made, where)  # under a name that is swept only now, when it is locked
        _folder = (os.getpid(), where)
        # after multiprocessing's own, of -100, which wants to find its socket's folder
        util.Finalize(None, _remove, _folder, exitpriority=-200)
    return _folder[1]


def _remove(owner: int, folder: str) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    """Of folders made on this host: containers that share a disk do not share process ids."""
    return f"zerolab-{zlib.crc32(platform.node().encode()):08x}-"


def sweep(base: str) -> None:
    """Remove what killed notebooks of this user have left on this host, and nothing else."""
    for name in os.listdir(base):
        match = re.fullmatch(rf"{re.escape(_prefix())}(\d+)-\w+", name)
        if not match or psutil.pid_exists(int(match[1])):
            continue
        folder = os.path.join(base, name)
        with contextlib.suppress(OSError):
            there = os.lstat(folder)
            mine = not hasattr(os, "getuid") or there.st_uid == os.getuid()
            if stat.S_ISDIR(there.st_mode) and mine:
                lock = _locked(os.path.join(folder, "lock"), os.O_RDWR)  # BlockingIOError: it lives
                shutil.rmtree(folder, ignore_errors=True)
                if lock is not None:
                    os.close(lock)


def _locked(path: str, flags: int) -> int | None:
    """Lock a file and return it; None without locks, OSError if another process has it."""
    try:
        import fcntl
    except ImportError:
        return None
    file = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def sockets_in(folder: str) -> Iterator[None]:
    """Have a server that is started inside keep its socket there, and remove the folder at its end.

    multiprocessing makes a temporary folder for the socket, and a killed notebook leaves that.
    """
    if len(os.path.join(folder, "pymp-12345678", "listener-12345678").encode()) > LONGEST_SOCKET:
        yield
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    os.environ[FOLDER] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before
        del os.environ[FOLDER]


def goes_with_the_server() -> None:
    """In the ranks' server: remove the notebook's folder when notebook and ranks are gone."""
    if folder := os.environ.pop(FOLDER, ""):
        atexit.register(_remove, os.getpid(), folder)


if private_net.in_fork_server():
    goes_with_the_server()
else:
    memory_ran_out()
