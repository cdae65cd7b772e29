"""Each lesson runs to its end in JupyterLab, in a real browser, as a learner meets it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from zerolab.course.derive import METADATA

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(path.name for path in (ROOT / "lessons").glob("*.ipynb"))
PICTURES = ROOT / "test-results"
SLIDER = """from IPython.display import display
import ipywidgets
slider = ipywidgets.IntSlider(3, 0, 9, description="ranks")
seen = ipywidgets.Label("3 ranks")
slider.observe(lambda change: setattr(seen, "value", f"{change['new']} ranks"), "value")
display(slider, seen)"""

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

from lab import LessonPage, browser_context, lab_address  # noqa: E402 (needs playwright)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of the lessons, with a notebook of our own that the machinery is tried on."""
    course = tmp_path_factory.mktemp("course")
    if LESSONS:
        shutil.copytree(ROOT / "lessons", course / "lessons")
    (course / "lessons").mkdir(exist_ok=True)
    cells = [
        new_markdown_cell("# A trial", id="title"),
        new_code_cell("print('16 bytes')", id="print"),
        new_code_cell("1 / 0", id="expected", metadata={"tags": ["raises-exception"]}),
        new_code_cell(SLIDER, id="slider"),
        new_code_cell("", id="empty"),
        new_code_cell("undefined", id="unexpected"),
    ]
    nbformat.write(
        new_notebook(cells=cells, metadata=METADATA), course / "lessons" / "zz_trial.ipynb"
    )
    return course


@pytest.fixture(scope="module")
def address(course, tmp_path_factory):
    """JupyterLab, started by the learner's command for a user who never used it before."""
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
    with browser_context(tmp_path_factory.mktemp("profile")) as context:
        yield context


@pytest.fixture
def lesson(address, context):
    """Call with a name to open that lesson; it is closed after the test."""
    opened = []

    def open_lesson(name: str) -> LessonPage:
        opened.append(LessonPage(context, address, name))
        return opened[-1]

    yield open_lesson
    for page in opened:
        page.close()


def test_a_first_visit_shows_the_first_lesson_and_nothing_before_it(course, address, context):
    first = sorted(path.name for path in (course / "lessons").glob("*.ipynb"))[0]
    assert f"/lab/tree/lessons/{first}?" in address
    page = LessonPage(context, address, first)
    page.page.wait_for_timeout(3000)  # the pop-up with news came late
    assert page.in_the_way() == []
    page.close()


def test_an_error_without_its_tag_is_found_and_a_slider_answers(lesson):
    trial = lesson("zz_trial.ipynb")
    trial.run_all()
    assert trial.failures() == [
        "zz_trial.ipynb, cell unexpected: NameError: name 'undefined' is not defined"
    ]
    handle = trial.page.locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    trial.page.get_by_text("4 ranks", exact=True).wait_for()
    assert trial.take_picture(PICTURES).stat().st_size > 1000


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_to_its_end_in_the_browser(lesson, name):
    page = lesson(name)
    page.run_all()
    page.take_picture(PICTURES)
    assert page.failures() == []
    assert page.complaints == []
    assert page.in_the_way() == []
