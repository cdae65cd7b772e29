"""What all tests share: steady property tests, figures without a display, worlds, and an order."""

import gc
import os
import random
import sys
from contextlib import ExitStack
from functools import lru_cache

import cloudpickle
import pytest
from hypothesis import settings

from zerolab.practice import world
from zerolab.practice.launcher import launch

os.environ.setdefault("MPLBACKEND", "agg")
# A test whose answer is right waits for no limit; one that hangs is told a little later.
os.environ.setdefault("ZEROLAB_PATIENCE", "3")
# Nor for a rank that is there, and merely has no core just now.
world.LOOK_LIMIT_S, world.STOP_LIMIT_S, world.START_LIMIT_S = 5.0, 10.0, 600.0
# Several processes test at once: one that waited for a second core would wait for another test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No deadline, as machines are shared; the same examples each time, so that red stays red.
settings.register_profile("zerolab", deadline=None, derandomize=True)
settings.load_profile("zerolab")
# Each fresh rank that meets FSDP would spend a second on these; the notebooks' ranks still do.
launch.PRELOAD = (*launch.PRELOAD, "torch.distributed.fsdp", "torch._dynamo")

# They take longest, so they begin first: else one worker would be left with one of them in the end.
# The very first asks for the most memory, before other workers' ranks hold theirs.
LONGEST = ["test_shared_host", "test_grading_class", "test_lab", "test_stages", "test_dry_run"]
LONGEST += ["test_thousand", "test_nbgrader", "test_identify", "test_site", "test_explorers"]
LONGEST += ["test_portable", "test_train", "test_checks_10", "test_offload", "test_hosts"]
LONGEST += ["test_checkpoint"]


@pytest.fixture(scope="session")
def world_of():
    """Worlds that the tests share, by size: `world_of(4).run(function)`."""
    from zerolab import World

    with ExitStack() as stack:
        yield lru_cache(lambda size: stack.enter_context(World(size, timeout=300)))


@pytest.fixture
def every_failure(monkeypatch):
    """All ranks fail, and none is waited for in vain: the slowest is heard too."""
    monkeypatch.setattr(world, "GRACE_S", 30.0)


def pytest_runtest_setup(item):
    """A test draws the same numbers each time, whatever ran before it.

    Hypothesis leaves a function that runs with each collection of garbage to time it: a Stop that
    arrived inside would be lost there, and the test that pressed it would wait.
    """
    random.seed(item.nodeid)
    gc.callbacks.clear()


def pytest_collection_modifyitems(items):
    """The longest files first, then the others; `make units` tells xdist to keep this order."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish():
    """Functions of tests reach ranks by value, as a cell's do: no rank need import pytest.

    And what was imported so far stays: checks collect garbage, and need not look through it all.
    """
    gc.collect()
    gc.freeze()
    for name, module in list(sys.modules.items()):
        if name.startswith("test_"):
            cloudpickle.register_pickle_by_value(module)
