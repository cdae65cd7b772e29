"""The fork server's first preload: a loopback that belongs to this notebook's ranks alone.

Gloo listens on the loopback without a key, so on a shared host other users could connect to it.
Where the system allows it, a process can move into a user and a network namespace of its own, and
the ranks forked from it live there too. It must have one thread, so this comes before torch.

Importing this module anywhere but in a fork server changes nothing. Ranks that must reach the
network need ZEROLAB_HOST_NETWORK=1 in the environment before the first World; where strangers share
the machine, ZEROLAB_PRIVATE_PORTS=required refuses ranks whose ports could be reached.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
INTERFACE_REQUEST = "16sh14x"  # struct ifreq: name, flags, the rest unused


def enter_private_network() -> None:
    """Move this process into a network with only a loopback; raise OSError where that is denied."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "namespaces are not allowed here")
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    raise_loopback()


def raise_loopback() -> None:
    """Turn on the loopback of a network that is new, as `ip link set lo up` does."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        answer = fcntl.ioctl(query, SIOCGIFFLAGS, struct.pack(INTERFACE_REQUEST, b"lo", 0))
        flags = struct.unpack(INTERFACE_REQUEST, answer)[1]
        fcntl.ioctl(query, SIOCSIFFLAGS, struct.pack(INTERFACE_REQUEST, b"lo", flags | IFF_UP))


def try_private_network() -> bool:
    """Enter a private network if a child, which tries first, could; say whether it was done."""
    if sys.platform != "linux" or os.environ.get("ZEROLAB_HOST_NETWORK"):
        return False
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(Exception):
            enter_private_network()
            code = 0
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        return False
    enter_private_network()
    return True


def in_fork_server() -> bool:
    """Say whether this process is multiprocessing's fork server (or was forked by it)."""
    return any("multiprocessing.forkserver import main" in word for word in sys.orig_argv)


private = False  # True in a fork server, and in its ranks, whose loopback nobody else can reach
if in_fork_server():
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Stop, pressed while torch loads, is for the notebook
    with contextlib.suppress(OSError):
        os.setsid()  # or who kills the kernel's process group ends what tidies up after it
    with contextlib.suppress(Exception):
        private = try_private_network()
