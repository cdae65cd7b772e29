"""zerolab: learn ZeRO by deriving, counting and comparing every number.

`import zerolab` is light. Looking up `World` begins to start the ranks' server in the background;
the names below load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "World": "zerolab.practice.world",
    "RankError": "zerolab.practice.world",
    "RankTimeout": "zerolab.practice.world",
    "check": "zerolab.course.checks",
    "given": "zerolab.course.checks",
    "hint": "zerolab.course.checks",
    "progress": "zerolab.course.progress",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"zerolab has no {name!r}; it has {', '.join(_HOME)}.")
    module = importlib.import_module(_HOME[name])
    if name == "World":
        module.start_server()
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext zerolab` brings the cell magic %%ranks."""
    importlib.import_module("zerolab.practice.launcher.magic").load_ipython_extension(ipython)
