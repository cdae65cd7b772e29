"""Each lesson runs to its end in JupyterLab, in a real browser, as a learner meets it."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from needs import require_browser

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

require_browser()

from lab import LessonPage  # noqa: E402 (needs playwright)


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
