"""A World under torchrun or srun: this process is a rank of theirs, and calls run in place."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

from zerolab.practice.launcher import group, system
from zerolab.practice.launcher import rank as rank_side


def _interface() -> str | None:
    """The network interface that gloo should use; None where it must find out by itself."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return system.loopback()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        query.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing, and shows the way there
        name = system.interface_of(query.getsockname()[0])
        return name if name != system.loopback() else None
    return None


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
        group.join_group(backend, check, rank, self.size)

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
