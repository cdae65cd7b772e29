"""Explorers, checks, the magic and Stop, in JupyterLab in a real browser, by keyboard."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from needs import require_browser

from zerolab.course.derive import METADATA, run
from zerolab.course.widgets import memory_view, offload_view, overlap_view, shard_view

require_browser()

from lab import BUSY, WAIT_MS  # noqa: E402 (needs playwright)

PICTURES = Path(__file__).resolve().parents[2] / "test-results"
CELLS = {
    "imports": "from zerolab import World, check\nfrom zerolab.course.widgets import *",
    "memory": "memory_explorer().show()",
    "overlap": "overlap_explorer().show()",
    "shards": "shard_map_explorer().show()",
    "offload": "offload_planner().show()",
    "answer": "def own(numel, n, rank):\n    length = -(-numel // n)\n"
    "    return min(rank * length, numel), min((rank + 1) * length, numel)\n"
    "check('05.2', own)",
    "wrong": "check('05.2', lambda numel, n, rank: (0, numel))",
    "world": "world = World(2)\n%load_ext zerolab",
    "magic": "%%ranks\nimport torch.distributed as dist\nmine = 10 + dist.get_rank()\n"
    "print(f'rank {dist.get_rank()} of {dist.get_world_size()}')",
    "variable": "%%ranks 1\nprint(mine)",
    "close": "world.close()",
}
HANG = """from zerolab import World
from zerolab.practice.comm import Comm
import torch

def waits_for_nobody():
    comm = Comm()
    if comm.rank == 0:
        comm.control_sum(torch.zeros(1))

if "world" not in globals():
    world = World(2, timeout=600)
    print("now it hangs")
    world.run(waits_for_nobody)
print(world.run(lambda: Comm().rank))"""
# What a slider is called, the key that is pressed once it has the focus, and what is then right.
MOVES = {
    "memory": ("ranks", "ArrowRight",
               memory_view("llama2-7b", 16, 1, "adamw-mixed", "adamw-mixed-fp32-grads", 80)),
    "overlap": ("link, one way", "End", overlap_view("llama2-7b", 3, 8, 450, 4, 1)),
    "shards": ("moment", "ArrowRight", shard_view(3, 4, 1)),
    "offload": ("micro-batches", "ArrowRight",
                offload_view("llama2-70b", "dgx-a100", 3, "cpu", "gpu", "gpu", 4, 2, "overlapped")),
}  # fmt: skip


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A folder of two notebooks: all that answers, stored as a lesson is; and a hang."""
    course = tmp_path_factory.mktemp("course")
    (course / "lessons").mkdir()
    cells = [new_code_cell(source, id=name) for name, source in CELLS.items()]
    trial = new_notebook(cells=[new_markdown_cell("# A trial", id="title"), *cells])
    path = course / "lessons" / "aa_trial.ipynb"
    nbformat.write(run(trial, path), path)
    hang = new_notebook(cells=[new_code_cell(HANG, id="hang")], metadata=METADATA)
    nbformat.write(hang, course / "lessons" / "bb_hang.ipynb")
    return course


def open_tall(lesson, name):
    """A lesson in a window as tall as all of it: cells out of sight would not be there."""
    page = lesson(name)
    page.page.set_viewport_size({"width": 1200, "height": 5200})
    return page


@pytest.fixture
def trial(lesson):
    page = open_tall(lesson, "aa_trial.ipynb")
    page.run_all()
    page.page.locator(".zerolab-explorer").nth(3).wait_for(timeout=WAIT_MS)
    return page


def explorer(page, name):
    return page.page.locator(".zerolab-explorer").nth(list(MOVES).index(name))


def press(box, slider, key):
    """Put the focus on a slider's handle, found by its label, and press a key."""
    row = box.locator(".widget-slider").filter(
        has=box.page.locator("label", has_text=re.compile(f"^{slider}$"))
    )
    handle = row.locator(".noUi-handle")
    handle.focus()
    handle.press(key)


def expect_view(box, view):
    """The words are those of the view, and so are the table and every byte of the picture."""
    box.get_by_text(view.words, exact=True).wait_for(timeout=WAIT_MS)
    rows = box.locator("tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.innerText))"
    )
    assert [tuple(row) for row in rows] == list(view.table)
    image = box.locator("img")
    assert image.get_attribute("alt") == view.words
    assert base64.b64decode(image.get_attribute("src").partition(",")[2]) == view.png


def texts(page, cell_id):
    """What stands below a cell, as text."""
    script = """id => [...jupyterapp.shell.currentWidget.content.widgets]
      .find(w => w.model.id === id).outputArea.node.innerText"""
    return page.page.evaluate(script, cell_id)


def test_all_that_a_learner_touches_answers(trial):
    assert trial.failures() == []
    for name, (slider, key, view) in MOVES.items():
        box = explorer(trial, name)
        press(box, slider, key)
        expect_view(box, view)
        PICTURES.mkdir(exist_ok=True)
        box.screenshot(path=PICTURES / f"explorer-{name}.png")
    assert "[ok] 05.2" in texts(trial, "answer")
    assert "[x] 05.2" in texts(trial, "wrong")
    assert re.findall(r"rank \d of 2", texts(trial, "magic")) == ["rank 0 of 2", "rank 1 of 2"]
    assert "11" in texts(trial, "variable")
    expect_bad_input_answered(trial)
    assert trial.complaints == []
    expect_a_dead_kernel_to_be_said(trial)


def expect_bad_input_answered(page):
    """A value out of range gives a sentence beside the last picture; a readout takes no typing."""
    box = explorer(page, "memory")
    field = box.get_by_role("combobox").first
    field.fill("1e30")
    field.press("Enter")
    alert = box.get_by_role("alert")
    alert.wait_for(timeout=WAIT_MS)
    assert "A model has 1 to 1e+14 parameters here, not 1e30." in alert.inner_text()
    assert box.locator("img").count() == 1
    readout = box.locator(".widget-readout").first
    readout.focus()
    page.page.keyboard.type("77")
    assert readout.inner_text() == "16"


def expect_a_dead_kernel_to_be_said(page):
    kill = """() => { jupyterapp.shell.currentWidget.sessionContext.session.kernel
      .requestExecute({code: 'import os; os.kill(os.getpid(), 9)'}) }"""
    page.page.evaluate(kill)
    gone = page.page.locator(".zerolab-explorer.jupyter-widgets-disconnected")
    gone.nth(3).wait_for(timeout=WAIT_MS)
    said = gone.first.evaluate("e => getComputedStyle(e, '::before').content")
    assert said == '"No kernel answers any more: run this cell again to go on."'
    assert gone.first.locator("img").count() == 1


def test_before_any_kernel_answers_the_still_figures_and_their_words_are_there(lesson):
    page = open_tall(lesson, "aa_trial.ipynb")
    stills = page.page.locator(".jp-RenderedImage img")
    stills.nth(3).wait_for(timeout=WAIT_MS)
    assert stills.count() == 4
    for name in MOVES:
        assert "as it stands at first; run the cell to move it." in texts(page, name)
        assert "Error" not in texts(page, name) and "Loading" not in texts(page, name)


def test_stop_ends_a_hang_and_the_ranks_go_on(lesson):
    page = lesson("bb_hang.ipynb")
    page.start_all()
    page.page.locator(".jp-OutputArea-output", has_text="now it hangs").wait_for(timeout=WAIT_MS)
    page.page.wait_for_timeout(1000)
    assert page.cells()[0]["busy"]
    page.page.get_by_role("button", name="Interrupt the kernel").click()
    page.page.wait_for_function(f"!{BUSY}", timeout=WAIT_MS)
    (error,) = page.cells()[0]["errors"]
    assert error["ename"] == "KeyboardInterrupt" and error["evalue"].startswith("stopped: ")
    page.run_all()
    assert texts(page, "hang").strip().endswith("[0, 1]")
    assert page.failures() == []
