"""A rank and its process group: joining, leaving, being stuck in it, and getting out."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import stat
from typing import TYPE_CHECKING, Any

from zerolab.practice.launcher import private_net, system

if TYPE_CHECKING:
    import torch.distributed as dist

GROUP_TIMEOUT = datetime.timedelta(days=1)  # the notebook's own limit comes first


def pending_since(time_ns: int) -> list[tuple[str, str]]:
    """Return this rank's unfinished collectives since a moment (time.time_ns).

    torch's flight recorder, which knows them, has no public name; without it the list is empty.
    """
    pending = []
    with contextlib.suppress(Exception):
        import torch._C._distributed_c10d as c10d

        dump: Any = getattr(c10d, "_dump_fr_trace_json")  # noqa: B009
        for e in json.loads(dump(True, False))["entries"]:
            if e["time_created_ns"] >= time_ns and not e["retired"]:
                number = e["p2p_seq_id" if e.get("is_p2p") else "collective_seq_id"]
                tensors = zip(e["input_dtypes"], e["input_sizes"], strict=False)
                given = " and ".join(f"{dtype} {shape}" for dtype, shape in tensors)
                pending.append((f"{e['profiling_name'].split(':')[-1]} #{number}", given))
    return pending


def shut_connections() -> None:
    """End what this process sends over its connections: who waits in gloo gets an error.

    A peer reads the end, closes, and so frees a wait on this side too. Shutting both directions
    at once loses a peer's send for good (1 of 100 raises hung); shutting the listening socket
    aborts the process. Windows does not list them; there leaving the group closes them, later.
    """
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []:
        with contextlib.suppress(OSError):
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # a listening socket has none: OSError
                        connection.shutdown(socket.SHUT_WR)


def forget_what_was_stopped() -> None:
    """Undo what an earlier call may have left switched on in this thread.

    Stop can strike inside the exit of a `with` block, and then a no_grad or a dispatch mode stays
    on for good. The stack of modes has no public name; where that is missing, modes stay.
    """
    import torch

    torch.set_grad_enabled(True)
    with contextlib.suppress(ImportError, AttributeError):
        from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

        while _get_current_dispatch_mode() is not None:
            _pop_mode()


def leave_group() -> None:
    """Leave the process group, whatever state it is in; never waits for a peer."""
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def join_group(
    backend: str, check: bool, rank: int, size: int, store: str | dist.Store
) -> dict[str, object]:
    """Form a group with the other ranks over a store, or the file of one.

    Returns the backend and whether its ports are private. Raises ValueError without GPUs for nccl,
    RuntimeError where the loopback is off, PermissionError where ports must be private
    (ZEROLAB_PRIVATE_PORTS=required) and cannot be.
    """
    if os.environ.get("ZEROLAB_PRIVATE_PORTS") == "required" and not private_net.private:
        what = "ports must be private (ZEROLAB_PRIVATE_PORTS), and network namespaces"
        raise PermissionError(f"{what} are not allowed here: ask who runs this machine")

    if isinstance(store, str) and system.interface_of("127.0.0.1") is None:
        raise RuntimeError("this machine's loopback is off: turn it on, as in ip link set lo up")

    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0  # none on Windows
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if backend == "nccl" and gpus < here:
        raise ValueError(f"{here} ranks need as many GPUs, here are {gpus}: use backend='gloo'")
    backend = ("nccl" if gpus >= here else "gloo") if backend == "auto" else backend
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.set_debug_level(dist.DebugLevel.DETAIL if check else dist.DebugLevel.OFF)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=dist.FileStore(store, size) if isinstance(store, str) else store,
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
    )
    return {"backend": backend, "private_ports": private_net.private}
