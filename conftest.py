"""Makes `pytest --nbval lessons solutions` strict, and leaves alone what a learner has done."""

import os

pytest_plugins = ["nbval_strict"]
os.environ["ZEROLAB_PROGRESS"] = "off"  # notebooks' kernels and ranks inherit it
