"""What all tests share: steady property tests, and figures without a display."""

import os
import sys
from contextlib import ExitStack
from functools import lru_cache

import cloudpickle
import pytest
from hypothesis import settings

from zerolab import World

os.environ.setdefault("MPLBACKEND", "agg")
# No deadline, as machines are shared; the same examples each time, so that red stays red.
settings.register_profile("zerolab", deadline=None, derandomize=True)
settings.load_profile("zerolab")


@pytest.fixture(scope="session")
def world_of():
    """Worlds that the tests share, by size: `world_of(4).run(function)`."""
    with ExitStack() as stack:
        yield lru_cache(lambda size: stack.enter_context(World(size, timeout=60)))


def pytest_collection_finish():
    """Functions of tests reach ranks by value, as a cell's do: no rank need import pytest."""
    for name, module in list(sys.modules.items()):
        if name.startswith("test_"):
            cloudpickle.register_pickle_by_value(module)
