"""Runs one program where it sees only what it needs: `python -m zerolab.course.grading.box SPEC`.

Linux namespaces, without any privilege: the program has a root of its own with the paths it may
see (read-only), a small /tmp and a /dev/shm in memory, a loopback and no other network, no sight of
other processes, and limits on each process. It runs as nobody where the grader is root. All of it
is gone when the program ends or when the grader does.

Sources: man pages namespaces(7), user_namespaces(7), pivot_root(2), mount_setattr(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

from zerolab.practice.launcher.private_net import raise_loopback

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
MNT_DETACH, AT_RECURSIVE, ATTR_RDONLY, SYS_MOUNT_SETATTR = 2, 0x8000, 1, 442
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER, SECCOMP_ALLOW, SECCOMP_ENOSYS, SECCOMP_KILL = 2, 0x7FFF0000, 0x50026, 1 << 31
NOBODY = 65534
THREADS = 10  # of a process, on average: the system counts threads where we count processes
FILES = 1024  # open at once, in one process
# By machine: its name for the kernel, and the calls for memory that no process is seen to hold
# (memfd_create, memfd_secret, shmget, msgget, add_key), and io_uring_setup, bpf, userfaultfd.
REFUSED = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 248, 425, 321, 323)),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 217, 425, 280, 282)),
}
DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> int:
    done = getattr(_libc, name)(*args)
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(done)


def _mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    target.mkdir(parents=True, exist_ok=True)
    _call("mount", source.encode(), str(target).encode(), kind.encode(), flags, data.encode())


def _bind(path: str, root: Path, read_only: bool = True) -> None:
    target = root / path.lstrip("/")
    if Path(path).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _call("mount", path.encode(), str(target).encode(), None, MS_BIND | MS_REC, None)
    if read_only:
        attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY, 0, 0, 0)
        at = str(target).encode()
        size = ctypes.sizeof(attributes)
        _call("syscall", SYS_MOUNT_SETATTR, -100, at, AT_RECURSIVE, ctypes.byref(attributes), size)


def _new_root(root: Path, spec: dict[str, Any]) -> None:
    """Builds the program's root in `root` and moves into it."""
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")
    size = spec["disk_bytes"]
    for place in ("tmp", "dev/shm"):
        _mount("tmpfs", root / place, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=1777")
    _mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for device in DEVICES:
        _bind(f"/dev/{device}", root, read_only=False)
    for name, at in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd{at}")
    for path in spec["visible"]:
        real = Path(path)
        if real.is_symlink():  # /bin, /lib
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(path))
        elif real.exists():
            _bind(path, root)
    for path in spec["hidden"]:
        _mount("tmpfs", root / path.lstrip("/"), "tmpfs", MS_RDONLY | MS_NOSUID, "size=4k,mode=555")
    with contextlib.suppress(OSError):  # no sandbox within the sandbox
        (root / "proc/sys/user/max_user_namespaces").write_text("0")
    old = root / ".old"
    old.mkdir()
    _call("pivot_root", str(root).encode(), str(old).encode())
    os.chdir("/")
    _call("umount2", b"/.old", MNT_DETACH)
    os.rmdir("/.old")
    _call("mount", None, b"/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)


def _enter_namespaces() -> None:
    """Namespaces of its own for this process; as root, nobody's id exists in them as well."""
    user, group = os.getuid(), os.getgid()
    ready, go = os.pipe()
    writer = os.fork() if user == 0 else 0
    if user == 0 and writer == 0:  # who stays outside may write maps of more than one id
        os.close(go)
        code = 1
        with contextlib.suppress(OSError):
            os.read(ready, 1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{os.getppid()}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            code = 0
        os._exit(code)
    _call("unshare", NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)
    if user == 0:
        os.write(go, b".")
        if os.waitpid(writer, 0)[1] != 0:
            raise OSError("the ids of the sandbox could not be mapped")
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    os.close(ready)
    os.close(go)
    raise_loopback()


class _Filter(ctypes.Structure):
    """A `struct sock_fprog`: how many instructions, and where."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def refuse_calls() -> None:
    """From here on the REFUSED calls do not exist, for this process and all that it starts.

    Source: seccomp(2). Where the kernel or the machine has no such filter, nothing happens.
    """
    if os.uname().machine not in REFUSED:
        return
    machine, calls = REFUSED[os.uname().machine]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    rest = len(calls) + 1
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, SECCOMP_KILL),
               (load, 0, 0, 0), (at_least, rest, 0, 1 << 30)]  # fmt: skip
    program += [(equal, rest - place, 0, call) for place, call in enumerate(calls, 1)]
    program += [(answer, 0, 0, SECCOMP_ALLOW), (answer, 0, 0, SECCOMP_ENOSYS)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    made = _Filter(len(program), ctypes.addressof(code))
    with contextlib.suppress(OSError):
        _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(made), 0, 0)


def limit(spec: dict[str, Any]) -> None:
    """Limits for this process and all that it starts."""
    for name, most in (
        (resource.RLIMIT_DATA, spec["memory_bytes"]),
        (resource.RLIMIT_NPROC, THREADS * spec["processes"]),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_FSIZE, spec["disk_bytes"]),
        (resource.RLIMIT_CPU, spec["cpu_seconds"]),
        (resource.RLIMIT_CORE, 0),
    ):
        highest = resource.getrlimit(name)[1]
        value = most if highest == resource.RLIM_INFINITY else min(most, highest)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(name, (value, value))


def _program(spec: dict[str, Any], was_root: bool) -> None:
    """Becomes the program. Never returns."""
    code = 127
    try:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        limit(spec)
        if was_root:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        refuse_calls()
        os.makedirs("/tmp/home", exist_ok=True)
        os.chdir("/tmp/home")
        command: list[str] = spec["command"]
        os.execve(command[0], command, spec["environment"])
    except OSError as error:
        print(error, file=sys.stderr)
    finally:
        os._exit(code)


def main() -> int:
    """The exit code of the program; 125 where this system does not allow a sandbox."""
    spec = json.loads(sys.argv[1])
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    was_root = os.getuid() == 0
    try:
        _enter_namespaces()
    except OSError as error:
        print(error, file=sys.stderr)
        return 125
    first = os.fork()  # process 1 in there: when it ends, everything in there does
    if first:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    try:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _new_root(Path(spec["root"]), spec)
    except OSError as error:
        print(error, file=sys.stderr)
        os._exit(125)
    program = os.fork()
    if program == 0:
        _program(spec, was_root)
    for stream in (0, 1):  # the program's alone: when it ends, its end of them closes
        os.close(stream)
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(min(255, abs(os.waitstatus_to_exitcode(status))))


if __name__ == "__main__":
    sys.exit(main())
