"""What the browser tests need; without it they are skipped, or fail where CI asks for them."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def require_browser() -> None:
    """Call at the head of a module, before anything imports playwright."""
    missing = [
        what
        for what, there in {
            "playwright": importlib.util.find_spec("playwright"),
            "Chromium": shutil.which("chromium") or shutil.which("chromium-browser"),
        }.items()
        if not there
    ]
    if missing:
        reason = f"the browser tests need {' and '.join(missing)}"
        if os.environ.get("ZEROLAB_REQUIRE_BROWSER"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)
