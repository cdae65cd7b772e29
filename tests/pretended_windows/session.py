"""A session with a World, run where zerolab believes in Windows; prints what was seen, as JSON."""

import _thread
import contextlib
import io
import json
import linecache
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from zerolab import RankError, World
from zerolab.practice import world as limits
from zerolab.practice.launcher import host

CELL = """def step(absent, how):
    import torch, torch.distributed as dist
    if dist.get_rank() == absent:
        return how()
    t = torch.full((5,), float(dist.get_rank() + 1))
    dist.all_reduce(t)  # the cell's own line
    return t.tolist()
"""


def step():
    """A function of a cell."""
    name = "<Cell In[3]>"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(True), name)
    variables = {"__name__": "__main__"}
    exec(compile(CELL, name, "exec"), variables)
    return variables["step"]


def lacking():
    from zerolab.practice.launcher import launch, rank, system

    sees = [hasattr(rank.os, "setsid"), hasattr(rank.signal, "pthread_kill")]
    sees += [hasattr(system.faulthandler, "register"), system.PIPES_HAVE_DESCRIPTORS]
    return launch.sys.platform, launch.start_method(), sees


def fail():
    raise LookupError("no such shard")


def circle():
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 2)


def hold_pythons_lock():
    import re

    from zerolab.practice.launcher.rank import namespace

    if namespace()["RANK"] == 1:
        re.match(r"(a+)+$", "a" * 64 + "b")  # takes ages inside C


def loop(folder):
    from zerolab.practice.launcher.rank import namespace

    namespace()["kept"] = 7
    Path(folder, str(namespace()["RANK"])).touch()
    while True:
        pass


def sleep(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(1e6)


def talk():
    from zerolab.practice.launcher.rank import namespace

    for word in ("first", "Ψ"):
        print(word, "of", namespace()["RANK"])
    if namespace()["RANK"] == 1:
        print("x" * 3_000_000)


def error_of(act, *args, **kwargs):
    try:
        act(*args, **kwargs)
    except (RankError, ValueError, KeyboardInterrupt) as error:
        shown = [line.rstrip("\n") for line in error._render_traceback_()]
        return {"kind": type(error).__name__, "text": str(error), "shown": "\n".join(shown)}


@contextlib.contextmanager
def stop_once_both_run():
    """Press Stop as Jupyter does on Windows: that wakes no notebook that waits."""
    with tempfile.TemporaryDirectory() as folder:

        def press():
            while len(os.listdir(folder)) < 2:
                time.sleep(0.01)
            time.sleep(1)  # by now both are past that file
            _thread.interrupt_main()

        thread = threading.Thread(target=press)
        thread.start()
        yield folder
        thread.join()


def main():
    seen = {"lacking": lacking(), "too many": error_of(World, 40)}
    # A machine may be slow: what follows is about what is said, not when.
    limits.LOOK_LIMIT_S, limits.STOP_LIMIT_S, limits.START_LIMIT_S = 5.0, 10.0, 600.0
    world = World(2, timeout=300)
    ready = step()

    def pids():
        return world.run(os.getpid)

    def usable():
        return world.run(ready, None, None) == [[3.0] * 5] * 2

    seen["on a rank"] = world.run(lacking)
    seen["sum"] = world.run(ready, None, None)
    first = pids()

    with contextlib.redirect_stdout(io.StringIO()) as out:
        world.run(talk)
    seen["printed"] = [line[:80] for line in out.getvalue().splitlines()]
    seen["raise"] = error_of(world.run, ready, 1, fail), usable(), pids() == first
    seen["hang"] = error_of(world.run, ready, 0, int, timeout=3), usable(), pids() == first
    with stop_once_both_run() as folder:
        error = error_of(world.run, loop, folder, timeout=600)
    seen["stopped loop"] = error, world.inspect("kept"), usable(), pids() == first
    with stop_once_both_run() as folder:
        error = error_of(world.run, sleep, folder, timeout=600)
    seen["stopped sleep"] = error, usable()
    seen["circle"] = error_of(world.run, circle, timeout=3), usable()
    before = pids()
    seen["lock"] = error_of(world.run, hold_pythons_lock, timeout=3), usable()
    seen["kept by the other"] = [a == b for a, b in zip(before, pids(), strict=True)]
    seen["exit"] = error_of(world.run, ready, 1, lambda: os._exit(7)), usable()
    world._links[0].process.kill()
    world._links[0].process.join()
    seen["killed"] = error_of(world.run, os.getpid), usable()
    before = pids()
    world.restart()
    seen["restarted"] = usable(), not {*before} & {*pids()}
    second, folder = pids(), world._folder
    world.close()
    alive = host.psutil.pid_exists
    seen["left"] = [n for n in {*first, *before, *second} if alive(n)], os.path.exists(folder)
    print(json.dumps(seen))


if __name__ == "__main__":
    sys.exit(main())
