"""Makes `pytest --nbval lessons solutions` strict from wherever it is called."""

pytest_plugins = ["nbval_strict"]
