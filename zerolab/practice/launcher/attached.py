"""A World under torchrun or srun: this process is a rank of theirs, and calls run in place."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from zerolab.practice.launcher import group, report, system
from zerolab.practice.launcher import rank as rank_side

if TYPE_CHECKING:
    import torch.distributed as dist

SILENT_S = 5.0  # that a rank waits for others without a word


def _interface() -> str | None:
    """The network interface that gloo should use; None where it must find out by itself."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return system.loopback()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        query.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing, and shows the way there
        name = system.interface_of(query.getsockname()[0])
        return name if name != system.loopback() else None
    return None


def _meet(rank: int, size: int) -> dist.TCPStore:
    """The launcher's store, once every rank has come to it; says on stderr for whom it waits.

    RuntimeError when GROUP_TIMEOUT ends, or where rank 0 has left.
    """
    import torch.distributed as dist

    host, port, limit = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], group.GROUP_TIMEOUT
    if not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"MASTER_PORT={port} is no port: give a number below 65536")
    end, missing = time.monotonic() + limit.total_seconds(), [0]

    def waits() -> str:
        return f"rank {rank} waits for {report.names(missing)} of {size} at {host}:{port}"

    late = threading.Timer(SILENT_S, lambda: print(f"zerolab: {waits()}", file=sys.stderr))
    late.daemon = True
    late.start()
    try:
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        missing = list(range(1, size)) if serves else [0]
        store = dist.TCPStore(host, int(port), size, serves, limit, False, multi_tenant=True)
        store.set(f"zerolab/{rank}", "")
        while not store.check([f"zerolab/{r}" for r in range(size)]) and time.monotonic() < end:
            missing = [r for r in range(size) if not store.check([f"zerolab/{r}"])]
            time.sleep(0.05)
        if store.check([f"zerolab/{r}" for r in range(size)]):
            return store
    except (dist.DistNetworkError, dist.DistStoreError):
        if rank == 0:  # its port is taken
            raise
    finally:
        late.cancel()
    raise RuntimeError(f"{waits()} in vain: start all ranks with the same MASTER_ADDR and port")


class Attached:
    """The same calls as World's, made by all ranks of the launcher, in the same order.

    An error is raised on the rank where it came up; time limits and restarts are the launcher's.
    Under srun, MASTER_ADDR defaults to this host, or with several hosts to where srun was called.
    Gloo listens on the loopback if all ranks are here, else where MASTER_ADDR is reached, unless
    GLOO_SOCKET_IFNAME names another interface. It has no key, and torchrun's store has none.
    ValueError for a device, link or latency: these are emulated in a World of its own alone.
    """

    private_ports = False

    def __init__(
        self,
        size: int,
        timeout: float = 60,
        check: bool = False,
        threads: int = 1,
        backend: str = "auto",
        **emulated: Any,
    ) -> None:
        import torch

        if given := [name for name, value in emulated.items() if value is not None]:
            raise ValueError(f"a launcher's ranks are not emulated: leave {', '.join(given)} away.")

        slurm = {
            "RANK": "SLURM_PROCID",
            "WORLD_SIZE": "SLURM_NTASKS",
            "LOCAL_RANK": "SLURM_LOCALID",
        }
        for name, source in slurm.items():
            if source in os.environ:
                os.environ.setdefault(name, os.environ[source])
        host = "127.0.0.1"
        if os.environ.get("SLURM_NNODES", "1") != "1":
            host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", host)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault(
            "MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 20000)
        )
        if "SLURM_NTASKS" in os.environ:
            hosts = int(os.environ.get("SLURM_NNODES", "1"))
            here = -(-int(os.environ["SLURM_NTASKS"]) // hosts)
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(here))
        if interface := _interface():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        rank, self.size, self.timeout = (
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            timeout,
        )
        if rank == 0 and size != self.size:
            sentence = f"World({size}) asks for {size} ranks; the launcher gave {self.size}."
            print(sentence, "They are used.", flush=True)
        torch.set_num_threads(threads)
        torch.manual_seed(rank)
        self._variables = rank_side.begin_namespace(rank, self.size)
        self._store = _meet(rank, self.size)
        group.join_group(backend, check, rank, self.size, self._store)

    def run(
        self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run the function here, if this is one of `ranks`; return the results of all of these."""
        import torch.distributed as dist

        kwargs.pop("timeout", None)
        chosen = list(range(self.size) if ranks is None else ranks)
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, fn(*args, **kwargs) if dist.get_rank() in chosen else None)
        return [results[r] for r in chosen]

    def first(self) -> bool:
        """Leave, and say whether this rank is the first to: that one tells what went wrong.

        Rank 0, which may have the store, stays a little until all have asked.
        """
        with contextlib.suppress(RuntimeError):  # the store has ended with the rank that told
            place, end = self._store.add("zerolab/told", 1), time.monotonic() + SILENT_S
            self.close()  # who waits for this rank has an error now
            while os.environ["RANK"] == "0" and time.monotonic() < end:
                time.sleep(0.05)
                if self._store.add("zerolab/told", 0) == self.size:
                    break
            return place == 1
        return False

    def inspect(self, expr: str, ranks: Iterable[int] | None = None) -> list[Any]:
        """Evaluate an expression over each rank's own variables (`namespace()`)."""
        return self.run(lambda: eval(expr, self._variables), ranks=ranks)

    def where(self, ranks: Iterable[int] | None = None) -> str:
        """Say that nobody stands beside these ranks to look at them."""
        return "The launcher started these ranks: look at each with py-spy."

    def restart(self) -> None:
        """Raise RuntimeError: only the launcher can."""
        raise RuntimeError("the launcher started these ranks: start the job again")

    def close(self) -> None:
        """Leave the group; the process goes on."""
        group.leave_group()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"World({self.size}), started by the launcher"
