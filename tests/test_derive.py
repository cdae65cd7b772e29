"""Lessons are derived from solutions, byte for byte the same each time, and a drift is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from queue import Empty

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from zerolab.course.derive import (
    DeriveError,
    cleaned,
    looking_often,
    main,
    read,
    refuse_local_outputs,
    run,
    strip_source,
)

EXERCISE = """def own(n):
    \"\"\"A docstring stays.\"\"\"
    ### BEGIN SOLUTION
    half = n // 2
    return half
    ### END SOLUTION
"""
STUBBED = """def own(n):
    \"\"\"A docstring stays.\"\"\"
    raise NotImplementedError("your code here")"""
HIDDEN = """print("seen")
### BEGIN HIDDEN TESTS
assert own(4) == 2
### END HIDDEN TESTS"""


def save(root: Path, *cells, folder="solutions", name="01_first.ipynb", **metadata) -> Path:
    path = root / folder / name
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=list(cells), metadata=metadata), path)
    return path


def exercise_cells():
    return [
        new_markdown_cell("# Who owns what?", id="title"),
        new_code_cell(
            EXERCISE, id="own", metadata={"nbgrader": {"grade_id": "own", "locked": False}}
        ),
        new_code_cell(HIDDEN, id="test"),
        new_code_cell("1 / 0", id="boom", metadata={"tags": ["raises-exception"]}),
        new_code_cell("secret = 1", id="secret", metadata={"tags": ["solution-only"]}),
        new_code_cell(
            # alone in its cell, and given time: a child's line takes its own way to the notebook
            "import subprocess, time\nsubprocess.run(['echo', 'child'])\ntime.sleep(2)",
            id="run",
        ),
    ]


def derive(root: Path, *args: str) -> int:
    return main(["--root", str(root), *args])


def as_if_derived(root: Path, *cells) -> None:
    """Put a solution and its lesson on disk without any run; the cells hold no markers."""
    save(root, *cells)
    save(root, *cells, folder="lessons")


@pytest.fixture(scope="module")
def derived(tmp_path_factory):
    """One solution, derived and run."""
    root = tmp_path_factory.mktemp("course")
    save(root, *exercise_cells(), widgets={"state": 1}, title="kept")
    assert derive(root) == 0
    return root


def test_a_solution_becomes_one_stub_line_and_hidden_tests_vanish(derived):
    cells = {c.id: c for c in read(derived / "lessons" / "01_first.ipynb").cells}
    assert cells["own"].source == STUBBED
    assert cells["test"].source == 'print("seen")'
    assert "secret" not in cells
    assert cells["own"].metadata.nbgrader.grade_id == "own"


def test_both_notebooks_keep_the_outputs_of_a_real_run(derived):
    for folder in ("lessons", "solutions"):
        cells = {c.id: c for c in read(derived / folder / "01_first.ipynb").cells}
        text = "".join(o.text for o in cells["run"].outputs)
        assert text == "child\n"  # what a child prints is kept too
        assert cells["boom"].outputs[0].ename == "ZeroDivisionError"
        assert all(c.execution_count for c in cells.values() if c.cell_type == "code")


def test_stored_metadata_holds_no_version_no_time_and_no_widget_state(derived):
    for folder in ("lessons", "solutions"):
        nb = read(derived / folder / "01_first.ipynb")
        assert nb.metadata == {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "title": "kept",
        }
        assert not any("execution" in c.metadata for c in nb.cells)


def test_a_widget_is_stored_as_its_still_figure():
    data = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "random"},
        "text/plain": "bars",
    }
    cell = new_code_cell("explore()", id="x", outputs=[new_output("display_data", data)])
    (kept,) = cleaned(new_notebook(cells=[cell])).cells[0].outputs
    assert kept.data == {"text/plain": "bars"}


def test_deriving_again_changes_no_byte_and_then_everything_is_in_step(derived, capsys):
    paths = sorted(derived.glob("*/*.ipynb"))
    before = [p.read_bytes() for p in paths]
    assert derive(derived, "01", "-j", "2") == 0
    assert [p.read_bytes() for p in paths] == before
    assert derive(derived, "--check") == 0
    assert "1 lessons in step" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"source": "# Who owns that?"},
        {"id": "other"},
        {"metadata": {"tags": ["nbval-skip"]}},
        {"metadata": {"nbgrader": {"points": 3}}},
        {"attachments": {"a.png": {"image/png": "aaaa"}}},
        {"cell_type": "raw"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_edit_by_hand_is_out_of_step(tmp_path, capsys, change):
    as_if_derived(tmp_path, new_markdown_cell("# Who owns what?", id="title"))
    assert derive(tmp_path, "--check") == 0
    cell = new_markdown_cell("# Who owns what?", id="title")
    cell.update(nbformat.from_dict(change))
    save(tmp_path, cell, folder="lessons")
    assert derive(tmp_path, "--check") == 1
    message = capsys.readouterr().err
    assert "lessons/01_first.ipynb, cell 1" in message and "out of step" in message
    assert message.count("\n") == 1


def test_a_run_alone_puts_nothing_out_of_step(tmp_path):
    as_if_derived(tmp_path, new_code_cell("2", id="two"))
    ran = new_code_cell(
        "2",
        id="two",
        execution_count=7,
        metadata={"execution": {"iopub.status.idle": "now"}},
        outputs=[new_output("execute_result", {"text/plain": "2"}, execution_count=7)],
    )
    save(tmp_path, ran, folder="lessons", language_info={"name": "python", "version": "3.99"})
    assert derive(tmp_path, "--check") == 0


def test_a_missing_a_stray_and_a_shorter_lesson_are_each_named(tmp_path, capsys):
    cell = new_markdown_cell("one", id="one")
    for name in ("01_a.ipynb", "02_b.ipynb"):
        save(tmp_path, cell, new_markdown_cell("two", id="two"), name=name)
    save(tmp_path, cell, folder="lessons", name="02_b.ipynb")
    save(tmp_path, cell, folder="lessons", name="03_c.ipynb")
    assert derive(tmp_path, "--check") == 1
    message = capsys.readouterr().err
    assert "lessons/01_a.ipynb is missing" in message
    assert "lessons/02_b.ipynb is out of step: it has 1 cells, its solution gives 2" in message
    assert "lessons/03_c.ipynb has no solution" in message
    assert derive(tmp_path, "--check", "04") == 1
    assert "No solution's name begins with 04" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("### BEGIN SOLUTION\nx = 1", "BEGIN SOLUTION without its END"),
        ("x = 1\n### END SOLUTION", "END SOLUTION without its BEGIN"),
        ("### BEGIN SOLUTION\n### BEGIN HIDDEN TESTS", "BEGIN HIDDEN TESTS inside of SOLUTION"),
        ("### BEGIN SOLUTION\n### END HIDDEN TESTS", "END HIDDEN TESTS without its BEGIN"),
        ("x = 1  ### BEGIN SOLUTION", "none of ours"),
        ("### BEGIN SOLUTIONS\n### END SOLUTIONS", "none of ours"),
    ],
)
def test_markers_without_a_pair_are_refused(tmp_path, capsys, source, message):
    save(tmp_path, new_code_cell(source, id="bad"))
    assert derive(tmp_path, "--check") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "lessons").exists()


def test_two_solutions_in_one_cell_give_two_stubs():
    source = "def f():\n    ### BEGIN SOLUTION\n    1\n    ### END SOLUTION\nmiddle\n" * 2
    assert strip_source(source, "STUB") == "def f():\n    STUB\nmiddle\ndef f():\n    STUB\nmiddle"


def test_doubled_and_missing_ids_are_refused(tmp_path, capsys):
    path = save(tmp_path, new_code_cell("1", id="same"), new_code_cell("2", id="other"))
    path.write_text(path.read_text().replace("other", "same"))
    assert derive(tmp_path, "--check") == 1
    assert "01_first.ipynb, cell 1 (id same) shares its id" in capsys.readouterr().err
    path.write_text(path.read_text().replace('"id": "same",', ""))
    assert derive(tmp_path, "--check") == 1
    assert "has no id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("saved to /" + "home/ada/shard.bin", "an absolute path"),
        ("<function f at 0x7f00deadbeef>", "a memory address"),
        ("rank 0 has pid 4711", "a process id"),
        ("rank 0 holds 0x10 bytes; see https://example.org/opt/x and a/tmp/b", None),
    ],
)
def test_outputs_that_differ_between_machines_are_refused(tmp_path, text, what):
    outputs = [new_output("stream", text=text)], [new_output("display_data", {"text/html": text})]
    for stored in outputs:
        nb = new_notebook(cells=[new_code_cell("show()", id="show", outputs=stored)])
        if what is None:
            refuse_local_outputs(nb, tmp_path / "01.ipynb")
        else:
            with pytest.raises(DeriveError, match=what):
                refuse_local_outputs(nb, tmp_path / "01.ipynb")


def test_a_run_that_prints_a_machine_path_is_refused_before_it_is_stored(tmp_path, capsys):
    path = save(tmp_path, new_code_cell("print('/' + 'tmp' + '/shard')", id="leak"))
    before = path.read_bytes()
    assert derive(tmp_path) == 1
    assert "01_first.ipynb, cell 1 (id leak) stores an absolute path" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_pieces_of_one_stream_are_stored_as_one():
    pieces = [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")]
    outputs = [new_output("stream", name=name, text=text) for name, text in pieces]
    nb = cleaned(new_notebook(cells=[new_code_cell("1", id="one", outputs=outputs)]))
    stored = [(output.name, output.text) for output in nb.cells[0].outputs]
    assert stored == [("stdout", "ab"), ("stderr", "c"), ("stdout", "d")]


def test_a_cell_that_fails_is_named_and_nothing_is_written(tmp_path, capsys):
    path = save(tmp_path, new_code_cell("1", id="fine"), new_code_cell("1 / 0", id="boom"))
    before = path.read_bytes()
    assert derive(tmp_path) == 1
    message = capsys.readouterr().err
    assert "solutions/01_first.ipynb, cell 2 (id boom) failed: ZeroDivisionError" in message
    assert path.read_bytes() == before
    assert not (tmp_path / "lessons").exists()


def test_a_reply_that_woke_nobody_is_seen_soon_and_silence_still_ends():
    asked = []

    async def asleep(timeout):
        asked.append(timeout)
        if len(asked) < 3:
            raise Empty
        return "the reply"

    async def silent(timeout):
        await asyncio.sleep(timeout)
        raise Empty

    assert asyncio.run(looking_often(asleep)(timeout=600)) == "the reply"
    assert len(asked) == 3 and max(asked) <= 1
    with pytest.raises(Empty):
        asyncio.run(looking_often(silent, 0.01)(timeout=0.05))


def test_a_notebook_is_run_by_a_client_that_looks_often(monkeypatch, tmp_path):
    looked = []

    def often(get_msg):
        looked.append(get_msg)
        return looking_often(get_msg)

    monkeypatch.setattr("zerolab.course.derive.looking_often", often)
    source = "from ipywidgets import interact\ninteract(lambda n: print(n), n=(0, 4));"
    ran = run(new_notebook(cells=[new_code_cell(source)]), tmp_path / "widget.ipynb")
    assert ran.cells[0].outputs and len(looked) == 1
