"""On PYTHONPATH, this makes zerolab believe that it runs on Windows; nobody else notices.

Python imports a module of this name at the start of each process, so of spawned ranks too. What
modules of zerolab import is then replaced by a view that lacks what Windows lacks: functions of os,
signals, faulthandler.register, fcntl, resource and others, files below /proc, /sys and /dev. Pipes
are no file descriptors. torch, multiprocessing and psutil stay Linux's own, as their Windows sides
are theirs to test.

Not played: gloo's transport on Windows (libuv), pipes and waits of Windows (there SIGINT wakes a
thread that sleeps, here a sleeping rank must be restarted), Ctrl-C in its console, drive letters,
open files that cannot be removed, and files whose text is not UTF-8 by default.
"""

import builtins
import sys
import types
from multiprocessing import connection, reduction

ABSENT_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog")
ABSENT_NAMES = {
    "os": """setsid setpgid setpgrp getpgid getsid killpg fork forkpty uname getuid geteuid getgid
        getegid getgroups wait3 wait4 mkfifo mknod chown lchown chroot fchmod fchown sysconf
        sched_getaffinity sched_yield nice getloadavg pread pwrite sendfile posix_fallocate ctermid
        ttyname openpty statvfs sync register_at_fork posix_spawn O_DIRECTORY O_ASYNC O_NONBLOCK
        O_DIRECT O_CLOEXEC O_SYNC WIFEXITED WEXITSTATUS""",
    "signal": """SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGHUP SIGCHLD SIGIO SIGPIPE SIGQUIT SIGSTOP
        SIGCONT SIGTSTP SIGURG alarm setitimer getitimer ITIMER_REAL pthread_kill pthread_sigmask
        sigwait sigtimedwait pause siginterrupt""",
    "faulthandler": "register unregister",
    "socket": "AF_UNIX socketpair_unix sethostname",
    "time": "tzset clock_settime pthread_getcpuclockid",
}
HIDDEN_FILES = ("/proc", "/sys", "/dev")


def is_zerolabs(name):
    return str(name).partition(".")[0] == "zerolab"


def hidden(path):
    return isinstance(path, str) and path.startswith(HIDDEN_FILES)


def missing_if_hidden(function):
    def call(path=".", *args, **kwargs):
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    return call


def open_no_folder(path, *args, **kwargs):
    import os

    if hidden(path) or os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os.open(path, *args, **kwargs)


class View(types.ModuleType):
    """A module as zerolab sees it: some names are other values, some are absent."""

    def __init__(self, real, absent=(), **other):
        super().__init__(real.__name__)
        self.__dict__.update(other)
        self.__dict__["_real"], self.__dict__["_absent"] = real, frozenset(absent)

    def __getattr__(self, name):
        if name in self._absent:
            raise AttributeError(f"{self._real.__name__!r} has no {name!r} on Windows")
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)


def kill(pid, number):
    raise AssertionError("on Windows os.kill ends the process, or sends Ctrl-C to its group")


class PipeConnection(connection.Connection):
    """A pipe whose handle says nothing to zerolab."""

    def fileno(self):
        caller = sys._getframe(1).f_globals.get("__name__")
        assert not is_zerolabs(caller), "on Windows a pipe has a handle, and no file descriptor"
        return super().fileno()


def views():
    import faulthandler
    import os
    import signal
    import socket
    import time

    path = View(
        os.path,
        isdir=lambda p: not hidden(p) and os.path.isdir(p),
        exists=lambda p: not hidden(p) and os.path.exists(p),
    )
    other = {
        "os": {"name": "nt", "path": path, "kill": kill, "open": open_no_folder}
        | {name: missing_if_hidden(getattr(os, name)) for name in ("listdir", "stat")}
    }
    found = {
        real.__name__: View(
            real, ABSENT_NAMES[real.__name__].split(), **other.get(real.__name__, {})
        )
        for real in (os, signal, faulthandler, socket, time)
    }
    return found | {"sys": View(sys, platform="win32"), "os.path": path}


real_import, real_open, seen = builtins.__import__, builtins.open, {}


def pretending_import(name, globals=None, locals=None, fromlist=(), level=0):  # noqa: A002
    if globals is None or level or not is_zerolabs(globals.get("__name__")):
        return real_import(name, globals, locals, fromlist, level)
    globals["open"] = missing_if_hidden(real_open)
    if not seen:
        seen.update(views())
    if name.partition(".")[0] in ABSENT_MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if name in seen:
        return seen[name if fromlist else name.partition(".")[0]]
    return real_import(name, globals, locals, fromlist, level)


reduction.register(PipeConnection, connection.reduce_connection)
connection.Connection = connection.PipeConnection = PipeConnection
builtins.__import__ = pretending_import
