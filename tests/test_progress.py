"""What the learner has done is kept, best points first, and never stands in the way of a check."""

import json
import os
import subprocess
import sys

import nbformat
import pytest

import zerolab
from zerolab import check
from zerolab.course import derive, progress
from zerolab.course.checks import EXERCISES

pytestmark = pytest.mark.usefixtures("silent")


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(progress, "_said", set())


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of progress of this test's own, not there yet."""
    path = tmp_path / "data" / "progress.json"
    monkeypatch.setenv("ZEROLAB_PROGRESS", str(path))
    return path


def row_of(lesson):
    return next(row for row in zerolab.progress().rows if row.lesson.startswith(lesson))


def test_a_verdict_is_kept_and_the_best_points_stay(file):
    check("04.1", "52 GB")
    assert json.loads(file.read_text()) == {"04.1": {"points": 0.0, "tries": 1}}
    assert "Next: 01.1" in repr(zerolab.progress())
    check("04.1", "208 GB")
    check("04.1", "1 GB")
    assert json.loads(file.read_text()) == {"04.1": {"points": 1.0, "tries": 3}}
    row = row_of("04")
    assert (row.lesson, row.passed, row.tried, row.points) == ("04 Memory breakdown", 1, 1, 1)
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


def test_a_stub_is_no_attempt_and_no_answer_is_stored(file):
    check("04.1", None)
    assert not file.exists()
    check("04.1", "secret apples")
    assert "apples" not in file.read_text()


def test_partial_points_count_and_do_not_pass(file):
    check("01.1", {"GB": 1e9})
    row = row_of("01")
    assert (row.passed, row.tried, row.points) == (0, 1, 1)


def test_all_exercises_have_a_row_and_the_next_one_is_the_first_that_is_open(file):
    seen = zerolab.progress()
    assert sum(row.exercises for row in seen.rows) == len(EXERCISES)
    assert sum(row.of for row in seen.rows) == sum(task.points for task in EXERCISES.values())
    for number in sorted(EXERCISES):
        assert f"Next: {number}, {EXERCISES[number].title}." in repr(zerolab.progress())
        progress.record(number, EXERCISES[number].points)
    assert "All exercises are passed." in zerolab.progress()._repr_markdown_()


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"04.1": 3}', b'{"04.1": {"points": "x", "tries": 1}}',
     b'{"04.1": {"points": NaN, "tries": 1}}', b'{"04.1": {"points": 1}}', b"[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_is_set_aside_with_one_sentence_and_a_new_one_begins(file, damage, capsys):
    file.parent.mkdir()
    file.with_name("progress-damaged-1.json").write_bytes(b"an earlier one")
    file.write_bytes(damage)
    assert float(check("04.1", "208 GB")) == 1
    check("04.1", "208 GB")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "damaged" in said[0]
    assert file.with_name("progress-damaged-1.json").read_bytes() == b"an earlier one"
    assert file.with_name("progress-damaged-2.json").read_bytes() == damage
    assert json.loads(file.read_text()) == {"04.1": {"points": 1.0, "tries": 2}}


def test_where_nothing_can_be_written_the_check_goes_on_and_says_so_once(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("ZEROLAB_PROGRESS", str(tmp_path / "a file" / "progress.json"))
    assert str(check("04.1", "208 GB")) == str(check("04.1", "208 GB"))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "not kept" in said[0]
    monkeypatch.setenv("ZEROLAB_PROGRESS", str(tmp_path))
    assert "cannot be read" in repr(zerolab.progress())


def test_what_is_no_plain_file_is_neither_read_nor_moved(tmp_path, monkeypatch, capsys):
    link = tmp_path / "progress.json"
    link.symlink_to(os.devnull)  # as by ZEROLAB_PROGRESS=/dev/null, and who may move that did
    monkeypatch.setenv("ZEROLAB_PROGRESS", str(link))
    assert float(check("04.1", "208 GB")) == 1
    assert "is not kept" in capsys.readouterr().err
    assert "cannot be read" in repr(zerolab.progress())
    assert list(tmp_path.iterdir()) == [link] and link.is_symlink()


def test_by_default_it_lies_in_jupyters_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("ZEROLAB_PROGRESS")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    assert progress.file_of_progress() == tmp_path / "zerolab" / "progress.json"
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "lessons" / "05_zero_stage_1.ipynb"))
    assert progress.file_of_progress() == tmp_path / "zerolab" / "progress.json"


def test_running_a_solution_is_not_the_learners_progress(file, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "course/solutions/05_zero_stage_1.ipynb")
    check("04.1", "208 GB")
    assert not file.exists()
    assert "not kept here" in repr(zerolab.progress())


def test_neither_tests_nor_derived_notebooks_write_to_it(file, tmp_path):
    source = "import os\nprint(os.environ['ZEROLAB_PROGRESS'])"
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    ran = derive.run(nb, tmp_path / "one.ipynb")
    assert ran.cells[0].outputs[0].text == "off\n"
    program = "import conftest, os; print(os.environ['ZEROLAB_PROGRESS'])"
    root = os.path.dirname(os.path.dirname(__file__))
    env = {**os.environ, "ZEROLAB_PROGRESS": str(file)}
    shown = subprocess.run([sys.executable, "-c", program], cwd=root, env=env, capture_output=True)
    assert shown.stdout == b"off\n"


def test_two_notebooks_at_once_leave_a_whole_file(file):
    program = "from zerolab.course.progress import record\nfor i in range(100): record('{}', i)"
    both = [
        subprocess.Popen([sys.executable, "-c", program.format(number)])
        for number in ("04.1", "05.1")
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert set(json.loads(file.read_text())) <= {"04.1", "05.1"}
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]
