"""JupyterLab and a browser for the tests of a module, which says what is in its `course`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def address(course, tmp_path_factory):
    """JupyterLab, started by the learner's command for a user who never used it before."""
    from lab import lab_address

    home = tmp_path_factory.mktemp("home")
    config = home / "jupyter_lab_config.json"
    config.write_text(json.dumps({"LabApp": {"expose_app_in_browser": True}}))
    env = {
        **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "JUPYTER_CONFIG_DIR": str(home),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
    }
    command = [str(Path(sys.executable).with_name("zerolab")), "lab", str(course), "--no-browser"]
    with lab_address(command, env) as address:
        yield address


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    from lab import browser_context

    with browser_context(tmp_path_factory.mktemp("profile")) as context:
        yield context


@pytest.fixture
def lesson(address, context):
    """Call with a name to open that lesson; it is closed after the test."""
    from lab import LessonPage

    opened = []

    def open_lesson(name: str) -> LessonPage:
        opened.append(LessonPage(context, address, name))
        return opened[-1]

    yield open_lesson
    for page in opened:
        page.close()
