"""A whole class, and a whole course: all graded, none lost, none graded wrong, nothing left."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import psutil
import pytest

from zerolab.cli import main
from zerolab.course.checks import EXERCISES
from zerolab.course.grading import sandbox
from zerolab.course.pretend import BROKEN, NORMAL, Submission, pretend
from zerolab.course.pretend_hostile import CHEATS, HARM

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    bool(sandbox.trusted_only()), reason=f"no sandbox here: {sandbox.trusted_only()}"
)


def rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def grade(capsys, *arguments: object) -> tuple[int, list[dict]]:
    code = main(["grade", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def expect_nothing_left(before: set[int]) -> None:
    left = {p.pid for p in psutil.Process().children(recursive=True)} - before
    assert left == set()


def pretended(folder: Path, lesson: str, kinds: tuple[str, ...]) -> list[Submission]:
    """A class with one learner of each of these kinds."""
    every = pretend(folder, lesson, learners=len((*NORMAL, *HARM, *CHEATS, *BROKEN)))
    for one in every:
        if one.kind not in kinds:
            shutil.rmtree(folder / one.learner)
    made = [one for one in every if one.kind in kinds]
    assert sorted(one.kind for one in made) == sorted(kinds)
    return made


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("lesson", "kinds"),  # a file that is broken is so in any lesson: in one that needs no ranks
    [("05", (*NORMAL, *HARM, *CHEATS)), ("02", BROKEN)],
    ids=["hostile", "broken"],
)
def test_a_class_with_every_kind_of_harm_is_graded_as_it_deserves(tmp_path, capsys, lesson, kinds):
    made = pretended(tmp_path / "class", lesson, kinds)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    out, pages = tmp_path / "grades.csv", tmp_path / "pages"
    code, grades = grade(capsys, tmp_path / "class", "--out", out, "--feedback", pages)
    expected, got = rows(tmp_path / "class" / "expected.csv"), rows(out)
    expected = {one.learner: expected[one.learner] for one in made}
    assert list(got) == sorted(expected)
    wrong = {
        name: (row["kind"], row["points"], got[name]["points"], got[name]["remarks"])
        for name, row in expected.items()
        if float(row["points"]) != float(got[name]["points"])
    }
    assert wrong == {}
    by_exercise = {
        (one["student"], r["id"]): (r["points"], r["reason"])
        for one in grades for r in one["exercises"]
    }  # fmt: skip
    for (name, exercise), (points, reason) in by_exercise.items():
        assert points == float(expected[name][exercise]), (expected[name]["kind"], reason)
        assert reason
    assert {one["student"] for one in grades if one["error"]} == {
        name for name, row in expected.items() if row["error"] == "yes"
    }
    assert code == any(one.error for one in made), "some could not be graded"
    assert len(list(pages.iterdir())) == len(made)
    expect_nothing_left(before)
    again = grade(capsys, tmp_path / "class", "--out", out)
    assert again == (code, grades), "a second run finds all that stands"


@pytest.mark.timeout(900)
def test_all_thirteen_lessons_of_one_learner_earn_every_point(tmp_path, capsys):
    (tmp_path / "in" / "ada").mkdir(parents=True)
    for path in (ROOT / "solutions").glob("*.ipynb"):
        shutil.copy(path, tmp_path / "in" / "ada")
    code, grades = grade(capsys, tmp_path / "in")
    lost = [r for one in grades for r in one["exercises"] if r["points"] != r["max_points"]]
    assert lost == []
    assert sum(one["points"] for one in grades) == sum(e.points for e in EXERCISES.values())
    assert (code, len(grades)) == (0, 13)


def test_two_runs_agree_and_two_learners_answers_are_not_exchangeable(tmp_path, capsys):
    """Typed numbers that are right for ada are wrong for bob."""
    from zerolab.course.checks import given

    folder = tmp_path / "in"
    lesson = next((ROOT / "lessons").glob("13_*.ipynb"))
    mine = given("13.7", "ada").shown * 2**30 / 16
    for name in ("ada", "bob"):
        nb = json.loads(lesson.read_text())
        for cell in nb["cells"]:
            if cell["id"] == "ex-13-7":
                cell["source"] = f"def parameters():\n    return {mine!r}"
        (folder / name).mkdir(parents=True)
        (folder / name / lesson.name).write_text(json.dumps(nb))
    assert given("13.7", "ada") != given("13.7", "bob")
    first, second = grade(capsys, folder), grade(capsys, folder)
    assert first == second
    assert [one["points"] for one in first[1]] == [1.0, 0.0]


SHORT_CUTS = {
    "imports": "from zerolab.practice.stage1 import Stage1",
    "finds by name": "import importlib\n    importlib.import_module('zerolab.practice.stage1')",
    "by way of another": "from zerolab.practice.measure import STAGES",
    "as an attribute": "import zerolab.practice\n    zerolab.practice.stage1",
}


def test_the_package_s_own_stage_is_out_of_reach_on_graded_ranks(tmp_path, capsys):
    lesson = next((ROOT / "lessons").glob("05_*.ipynb"))
    for name, line in SHORT_CUTS.items():
        nb = json.loads(lesson.read_text())
        for cell in nb["cells"]:
            if cell["id"] == "ex-05-4":
                cell["source"] = f"def stage1_step(own, comm):\n    {line}\n    raise LookupError"
        (tmp_path / name).mkdir()
        (tmp_path / name / lesson.name).write_text(json.dumps(nb))
    for one in grade(capsys, tmp_path)[1]:
        said = next(r["reason"] for r in one["exercises"] if r["id"] == "05.4")
        if one["student"] == "as an attribute":
            assert "AttributeError" in said
        else:
            assert "cannot be used in a graded answer: write it yourself" in said


def test_the_json_has_what_a_gradebook_reads(tmp_path, capsys):
    (tmp_path / "ada").mkdir()
    shutil.copy(next((ROOT / "lessons").glob("02_*.ipynb")), tmp_path / "ada")
    (one,) = grade(capsys, tmp_path)[1]
    assert set(one) >= {"student", "notebook", "points", "max_points", "exercises", "error"}
    assert set(one["exercises"][0]) == {"id", "points", "max_points", "reason"}
    assert {r["reason"] for r in one["exercises"]} == {"not attempted"}
    assert one["points"] == 0
