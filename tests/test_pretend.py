"""A pretended class is what it says: the same each time, with a fair grade, and never run here."""

from __future__ import annotations

import ast
import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from zerolab import check
from zerolab.course import pretend as module
from zerolab.course.pretend import BROKEN, NORMAL, Lesson, main, make_class
from zerolab.course.pretend_answers import NEAR_MISSES, STUCK
from zerolab.course.pretend_hostile import CHEATS, HARM, WARNING

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "05"
    assert main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    with (folder / "expected.csv").open() as file:
        return {row["kind"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def lesson():
    return Lesson(SOLUTIONS[4])


def notebook(folder: Path, row: dict[str, str]) -> dict:
    """As it lies on disk, without nbformat's repairs."""
    return json.loads((folder / row["student"] / SOLUTIONS[4].name).read_text())


def cell(nb: dict, name: str) -> str:
    (found,) = [c for c in nb["cells"] if c["id"] == name]
    return "".join(found["source"])


def answer_of(lesson: Lesson, source: str) -> object:
    """The function that an exercise's cell defines, with the names that the lesson imports."""
    scope: dict[str, object] = {}
    imports = next(c for c in lesson.stubs.cells if c.cell_type == "code")
    exec(imports.source, scope)
    exec(source, scope)
    (name,) = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    return scope[name]


def test_thirty_hold_every_kind_and_half_of_them_are_ordinary(folder):
    with (folder / "expected.csv").open() as file:
        kinds = Counter(row["kind"] for row in csv.DictReader(file))
    assert kinds.total() == 30
    assert set(kinds) == {*NORMAL, *HARM, *CHEATS, *BROKEN}
    assert sum(kinds[k] for k in (*HARM, *CHEATS, *BROKEN)) == 21


def test_the_same_arguments_make_the_same_class_to_the_byte(folder, tmp_path):
    def bytes_of(root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    assert main([str(tmp_path / "again")]) == 0
    assert main([str(tmp_path / "other"), "--seed", "1"]) == 0
    assert bytes_of(tmp_path / "again") == bytes_of(folder)
    assert bytes_of(tmp_path / "other") != bytes_of(folder)


def test_no_judge_is_loaded_to_make_it(tmp_path):
    program = (
        f"import sys; from zerolab.course.pretend import main; main([{str(tmp_path / 'c')!r}])\n"
        "print([m for m in sys.modules if 'zerolab.course.checks' in m or m == 'torch'])"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert made.stdout.endswith("[]\n"), made.stderr


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: p.stem)
def test_every_lesson_has_a_class_whose_points_follow_from_what_was_filled_in(path):
    lesson = Lesson(path)
    full = sum(task.points for task in lesson.tasks)
    made = {each.kind: each for each in make_class(lesson, 30, 0)}
    assert sum(made["right"].points.values()) == full
    assert sum(made["untouched"].points.values()) == 0
    assert 0 < sum(made["half"].points.values()) < full
    for task in lesson.tasks:
        answer = made["right"].files[path.name].cells[task.cell].source
        assert answer == lesson.answers[task.number]
        assert "### " not in answer and "your code here" not in answer
        assert "your code here" in made["untouched"].files[path.name].cells[task.cell].source
    for kind in HARM:
        lost = lesson.tasks[1]
        assert made[kind].points == {
            task.number: 0 if task is lost else task.points for task in lesson.tasks
        }


def test_whoever_is_half_right_is_neither_all_right_nor_all_wrong(lesson):
    halves = [each for each in make_class(lesson, 200, 0) if each.kind == "half"]
    assert len(halves) > 50
    assert all(0 < sum(each.points.values()) < 10 for each in halves)


@pytest.mark.parametrize(
    ("number", "body", "points"),
    [(n, *each) for n, bodies in NEAR_MISSES.items() for each in bodies]
    + [(n, STUCK, 0) for n in ("05.1", "05.2", "05.3", "05.4", "05.5")],
)
def test_the_judge_gives_what_is_expected_of_a_near_miss(number, body, points):
    (path,) = [path for path in SOLUTIONS if path.name.startswith(number[:2])]
    lesson = Lesson(path)
    (task,) = [task for task in lesson.tasks if task.number == number]
    verdict = check(number, answer_of(lesson, lesson.with_body(task, body)))
    assert (float(verdict), verdict.status) == (points, "not yet")


def test_a_half_right_row_adds_up(folder, rows):
    for row in rows.values():
        assert float(row["points"]) == sum(float(row[f"05.{n}"]) for n in range(1, 6))
        assert row["error"] in ("yes", "no")
    errors = {kind for kind, row in rows.items() if row["error"] == "yes"}
    assert errors == {"not a notebook", "nothing submitted", "another language"}


@pytest.mark.parametrize("kind", HARM)
def test_harm_stands_in_one_cell_says_so_and_is_python(folder, rows, kind):
    nb = notebook(folder, rows[kind])
    sources = {c["id"]: "".join(c["source"]) for c in nb["cells"]}
    assert [name for name, text in sources.items() if WARNING in text] == ["ex-05-2"]
    tree = ast.parse(sources["ex-05-2"])
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    inside = WARNING in ast.get_source_segment(sources["ex-05-2"], function)
    assert inside is HARM[kind].when_called
    assert sources["ex-05-4"].count("comm.reduce_scatter") == 1, "the others are right"


def test_a_cheat_that_asks_its_judge_fools_a_check_in_its_own_process(lesson):
    task = lesson.tasks[-1]
    answer = answer_of(lesson, lesson.with_body(task, CHEATS["asks its judge"].body))
    assert float(check("05.5", answer)) == 1


def test_a_cheat_that_reads_the_solutions_finds_them_where_they_are(folder, rows, lesson):
    nb = notebook(folder, rows["reads the solutions"])
    assert float(check("05.5", answer_of(lesson, cell(nb, "ex-05-5")))) == 1
    assert float(check("05.2", answer_of(lesson, cell(nb, "ex-05-2")))) == 2


@pytest.mark.parametrize("kind", ["edits the checks", "shadows check"])
def test_a_cheat_that_changes_the_check_fools_it(folder, rows, kind):
    nb = notebook(folder, rows[kind])
    program = "\n".join(
        [
            "from zerolab import check",
            cell(nb, "my-own-cell"),
            cell(nb, "ex-05-5"),
            f"print(repr({cell(nb, 'check-05-5')}))",
        ]
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "1", ran.stderr


def test_a_cheat_that_edits_locked_cells_writes_full_points_there(folder, rows):
    nb = notebook(folder, rows["edits locked cells"])
    assert [cell(nb, f"check-05-{n}") for n in range(1, 6)] == ["1", "2", "2", "4", "1"]


def test_the_broken_ones_are_broken_as_they_say(folder, rows):
    def ids(kind: str) -> list[str]:
        return [c["id"] for c in notebook(folder, rows[kind])["cells"]]

    with pytest.raises(json.JSONDecodeError):
        notebook(folder, rows["not a notebook"])
    assert not list((folder / rows["nothing submitted"]["student"]).iterdir())
    assert notebook(folder, rows["another language"])["metadata"]["kernelspec"]["name"] == "ir"
    whole = ids("right")
    assert set(whole) - set(ids("cells removed")) == {"ex-05-5", "check-05-5"}
    assert len(set(whole) - set(ids("an old release"))) == 6
    assert ids("cells twice").count("ex-05-5") == 2
    assert sorted(ids("cells in another order")) == sorted(whole) != ids("cells in another order")
    assert not set(ids("ids renamed")) & set(whole)
    twice = sorted((folder / rows["submitted twice"]["student"]).iterdir())
    assert [path.name for path in twice] == [
        "05_zero_stage_1-Copy1.ipynb", "05_zero_stage_1.ipynb",
    ]  # fmt: skip


def test_whoever_has_numbers_of_their_own_has_their_own_name(lesson):
    made = make_class(Lesson(SOLUTIONS[12]), 3, 0)
    for each in made:
        nb = each.files[SOLUTIONS[12].name]
        nbformat.validate(nb)
        assert any(f'learner = "{each.learner}"' in c.source for c in nb.cells)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lesson", "99"], "No single lesson"),
        (["--lesson", "0"], "No single lesson"),
        (["--learners", "0"], "at least one"),
    ],
)
def test_what_makes_no_class_is_said_in_one_sentence(tmp_path, capsys, options, words):
    assert main([str(tmp_path / "c"), *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_it_writes_into_no_folder_that_holds_something(folder, capsys, tmp_path, monkeypatch):
    assert main([str(folder)]) == 2
    assert "not empty" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zerolab.course.release.__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert main([str(tmp_path / "c")]) == 2
    assert "inside a clone" in capsys.readouterr().err


def test_nothing_hostile_is_reached_by_importing_it():
    for name in ("pretend", "pretend_answers", "pretend_hostile"):
        tree = ast.parse((Path(module.__file__).parent / f"{name}.py").read_text())
        called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        assert not {c for c in called if c.split(".")[0] in ("os", "socket", "exec", "eval")}
