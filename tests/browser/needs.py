"""What the browser tests need; without it they are skipped, or fail where CI asks for them."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def require_browser(*modules: str) -> None:
    """Call at the head of a module, before anything imports playwright or the other `modules`."""
    missing = [
        what
        for what, there in {
            "Chromium": shutil.which("chromium") or shutil.which("chromium-browser"),
            **{name: importlib.util.find_spec(name) for name in ("playwright", *modules)},
        }.items()
        if not there
    ]
    if missing:
        reason = f"the browser tests need {' and '.join(missing)}"
        if os.environ.get("ZEROLAB_REQUIRE_BROWSER"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)
