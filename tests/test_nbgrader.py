"""nbgrader takes the lessons as they are, gives partial credit, and its traps are closed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("nbgrader", reason="nbgrader is not installed: the extra `grading` brings it")

from nbgrader.api import Gradebook
from nbgrader.utils import compute_checksum, determine_grade

from zerolab.course import nbgrader_course
from zerolab.course.nbgrader_course import ForLearner, VerdictAlone, main, make_course
from zerolab.course.pretend import Lesson
from zerolab.course.pretend_answers import NEAR_MISSES
from zerolab.course.release import ReleaseError

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))
NAME = "05_zero_stage_1"


def marked(nb):
    return {c.metadata.nbgrader.grade_id: c for c in nb.cells if "nbgrader" in c.metadata}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nbgrader") / "course"
    make_course(folder, [], ROOT)
    return folder


def nbgrader(course: Path, *words: str) -> str:
    """The command in its folder, as from a shell in which no environment is activated."""
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    ended = subprocess.run(
        [sys.executable, "-m", "nbgrader", *words],
        env=env | {"PATH": os.defpath},
        cwd=course,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stderr


def submissions() -> dict[str, nbformat.NotebookNode]:
    lesson = Lesson(ROOT / "solutions" / f"{NAME}.ipynb")
    tasks = {task.number: task for task in lesson.tasks}
    twice_the_traffic = lesson.with_body(tasks["05.4"], NEAR_MISSES["05.4"][0][0])
    half = {"05.1": lesson.answers["05.1"], "05.4": twice_the_traffic}
    never = "import time\n\nwhile True:\n    time.sleep(1)\n\n\n" + lesson.answers["05.2"]
    made = {
        "right": lesson.answers,
        "half": half,
        "stub": {},
        "looping": lesson.answers | {"05.2": never},
    }
    return {name: lesson.notebook(name, sources) for name, sources in made.items()}


@pytest.fixture(scope="module")
def graded(course):
    """student -> points by grade id, after nbgrader's own autograde and generate_feedback."""
    for student, notebook in submissions().items():
        folder = course / "submitted" / student / NAME
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / f"{NAME}.ipynb")
    # With locked cells edited, too: they are restored.
    path = course / "submitted" / "stub" / NAME / f"{NAME}.ipynb"
    notebook = nbformat.read(path, 4)
    marked(notebook)["check-05-4"].source = "4"
    nbformat.write(notebook, path)
    nbgrader(course, "autograde", NAME)
    nbgrader(course, "generate_feedback", NAME)
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        return {
            submission.student.id: {g.cell.name: g.score for g in submission.notebooks[0].grades}
            for submission in book.assignment_submissions(NAME)
        }


def points(*each: float) -> dict[str, float]:
    return {f"check-05-{number}": value for number, value in enumerate(each, 1)}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("student", "expected"),
    [
        ("right", points(1, 2, 2, 4, 1)),
        ("half", points(1, 0, 0, 2, 0)),
        ("stub", points(0, 0, 0, 0, 0)),
        ("looping", points(1, 0, 2, 4, 1)),
    ],
)
def test_a_student_gets_their_points_and_part_of_them_where_due(graded, student, expected):
    assert graded[student] == expected


@pytest.mark.timeout(2400)
def test_feedback_tells_the_misconception(graded, course):
    page = (course / "feedback" / "half" / NAME / f"{NAME}.html").read_text()
    assert "6Ψ" in page and "A reduce-scatter sends half as much" in page
    assert len(graded) == 4


def test_a_lesson_as_handed_out_is_what_nbgrader_would_make_of_the_solution(course):
    """So a stub counts as no response, and no check cell looks edited."""
    assert len(LESSONS) == 13
    for path in LESSONS:
        lesson = marked(nbformat.read(path, 4))
        made = marked(nbformat.read(course / ".generated" / path.stem / path.name, 4))
        assert set(lesson) == set(made), path.name
        for grade_id, cell in lesson.items():
            assert compute_checksum(cell) == made[grade_id].metadata.nbgrader.checksum, grade_id
    assert (course / "release" / NAME / f"{NAME}.ipynb").read_bytes() == LESSONS[4].read_bytes()


def test_every_exercise_is_code_that_a_machine_grades():
    """nbgrader would replace a Markdown answer whole, and wait for a person to grade it."""
    for path in LESSONS:
        for grade_id, cell in marked(nbformat.read(path, 4)).items():
            facts = cell.metadata.nbgrader
            assert cell.cell_type == "code"
            assert (facts.solution, facts.grade, facts.locked) == (
                (True, False, False) if grade_id.startswith("ex-") else (False, True, True)
            )


def graded_cell(*outputs: dict) -> float:
    facts = {"grade": True, "grade_id": "check-05-4", "locked": True, "points": 4,
             "schema_version": 3, "solution": False, "task": False}  # fmt: skip
    cell = nbformat.v4.new_code_cell("check(...)", metadata={"nbgrader": facts})
    cell.outputs = [nbformat.from_dict(output) for output in outputs]
    cell, _ = VerdictAlone().preprocess_cell(cell, {}, 0)
    return determine_grade(cell)[0]


def shows(text: str) -> dict:
    data = {"text/plain": text}
    kind = "execute_result"
    return {"output_type": kind, "data": data, "metadata": {}, "execution_count": 1}


def says(text: str, name: str) -> dict:
    return {"output_type": "stream", "name": name, "text": text}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([shows("4")], 4),
        ([shows("2.5")], 2.5),
        ([shows("0")], 0),
        ([says("UserWarning: slow", "stderr"), shows("4")], 4),
        ([says("[x] 05.4 not yet", "stdout")], 0),
        ([], 0),
        ([shows("None")], 0),
        ([shows("nan")], 0),
        ([shows("-1")], 0),
        ([shows("5")], 0),
    ],
)
def test_a_check_cell_is_worth_the_number_that_it_shows(outputs, expected):
    assert graded_cell(*outputs) == expected


def test_personal_numbers_are_those_of_the_student_s_id_and_verdicts_take_their_time(monkeypatch):
    monkeypatch.setenv("ZEROLAB_LEARNER", "nobody")
    monkeypatch.setenv("ZEROLAB_PROGRESS", "here.json")
    monkeypatch.delenv("ZEROLAB_PATIENCE")
    ForLearner().preprocess(None, {"nbgrader": {"student": "ada"}})
    assert os.environ["ZEROLAB_LEARNER"] == "ada"
    assert os.environ["ZEROLAB_PROGRESS"] == "off"
    assert float(os.environ["ZEROLAB_PATIENCE"]) > 1


@pytest.mark.parametrize(
    ("names", "words"), [(["99"], "begins a lesson"), (["05", "99"], "begins a lesson")]
)
def test_what_makes_no_course_is_said_in_one_sentence(tmp_path, capsys, names, words):
    assert main([str(tmp_path / "c"), *names]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_a_course_is_made_in_an_empty_folder_only(tmp_path):
    (tmp_path / "gradebook.db").write_text("of another year")
    with pytest.raises(ReleaseError, match="not empty"):
        make_course(tmp_path, ["05"])


def test_without_nbgrader_one_sentence_says_what_to_install(tmp_path):
    copied = tmp_path / "nbgrader_course.py"
    shutil.copy(nbgrader_course.__file__, copied)
    program = (
        f"import sys; sys.modules['nbgrader'] = None; import runpy; runpy.run_path({str(copied)!r})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1 and ".[grading]" in ended.stderr
