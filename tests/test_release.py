"""What an instructor hands out works, and holds nothing of the solutions."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from zerolab import cli
from zerolab.course.derive import MARKER, run
from zerolab.course.release import ReleaseError, find_clone, release

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "zerolab"
    release(folder, ROOT)
    return folder


@pytest.fixture
def clone(tmp_path):
    """A clone with two lessons and a little of the package, to be spoiled."""
    for name in ("Makefile", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "zerolab" / "course").mkdir(parents=True)
    for room in ("lessons", "solutions"):
        (tmp_path / room).mkdir()
        for path in SOLUTIONS[:2]:
            shutil.copy(ROOT / room / path.name, tmp_path / room)
    return tmp_path


def answers(path: Path) -> list[str]:
    """What stands between the solution markers of a notebook, a string for each pair."""
    found, inside = [], None
    for cell in nbformat.read(path, 4).cells:
        for line in cell.source.split("\n"):
            marker = MARKER.match(line)
            if marker and marker["kind"] == "SOLUTION":
                if marker["end"] == "END":
                    found.append("\n".join(inside))
                inside = [] if marker["end"] == "BEGIN" else None
            elif inside is not None:
                inside.append(line)
    return found


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_no_answer_of_a_solution_is_in_a_lesson_that_is_handed_out(handout):
    assert len(SOLUTIONS) == 13
    for path in SOLUTIONS:
        lesson = nbformat.read(handout / "lessons" / path.name, 4)
        text = "\n".join(cell.source for cell in lesson.cells)
        assert answers(path), path.name
        for answer in answers(path):
            assert answer not in text, f"{path.name} gives away {answer!r}"
        assert "### " + "BEGIN" not in text


def test_no_file_but_the_judges_own_holds_an_answer_of_several_lines(handout):
    """The judges compare with right answers: docs/guide says so, and it is not hidden."""
    long = [a for path in SOLUTIONS for a in answers(path) if len(a.split("\n")) >= 3]
    assert len(long) > 20
    squeezed = {answer: re.sub(r"\s+", " ", answer) for answer in long}
    judges = handout / "zerolab" / "course" / "checks"
    for path in files_of(handout):
        if judges in path.parents:
            continue
        text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
        found = [answer for answer, words in squeezed.items() if words in text]
        assert found == [], f"{path.relative_to(handout)} gives away {found[0]!r}"


def test_the_rooms_are_those_of_a_learner(handout):
    assert {path.name for path in handout.iterdir()} == {
        ".gitignore", "LICENSE", "Makefile", "README.md", "constraints.txt", "environment.yml",
        "lessons", "pyproject.toml", "zerolab",
    }  # fmt: skip
    names = {path.relative_to(handout).as_posix() for path in files_of(handout)}
    assert {n for n in names if n.startswith("lessons/")} == {
        f"lessons/{path.name}" for path in SOLUTIONS
    }
    assert "zerolab/practice/stage1.py" in names and "zerolab/course/checks/core.py" in names
    assert not [n for n in names if "pretend" in n or "test" in n or n.endswith(".pyc")]


def test_the_readme_and_the_makefile_name_nothing_that_is_not_there(handout):
    readme = (handout / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert link.startswith("http") or (handout / link).exists(), link
    rules = (handout / "Makefile").read_text()
    for word in ("solutions", "tests", "make test", "make site", "CONTRIBUTING", "nbval"):
        assert word not in readme.replace("the tests fail", ""), word
        assert word not in rules, word
    assert "macOS" in readme, "what was not tried is still said"


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_lab_sets_up_and_starts_and_nothing_else_is_offered(handout):
    def make(*args: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
        command = ["make", "--no-print-directory", "--dry-run", *args]
        return subprocess.run(command, env=env, cwd=handout, capture_output=True, text=True)

    assert re.search(r"pip install .*-e \.\n(.*\n)+\.venv/bin/zerolab lab\n", make("lab").stdout)
    assert make("clean").returncode == 0
    assert make("test").returncode != 0


def test_every_import_of_the_package_and_the_lessons_is_met_inside_the_release(handout):
    missing = []
    sources = {path: path.read_text() for path in (handout / "zerolab").rglob("*.py")}
    for path in (handout / "lessons").glob("*.ipynb"):
        cells = nbformat.read(path, 4).cells
        sources[path] = "\n".join(c.source for c in cells if c.cell_type == "code")
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerolab"):
                assert not node.level, "imports are absolute"
                place = handout.joinpath(*node.module.split("."))
                if not (place.with_suffix(".py").exists() or (place / "__init__.py").exists()):
                    missing.append(f"{path.name} imports {node.module}")
    assert missing == []


@pytest.mark.parametrize("number", ["02", "05"])
def test_a_lesson_runs_on_the_package_that_is_handed_out(handout, number, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(handout))
    (path,) = (handout / "lessons").glob(f"{number}_*.ipynb")
    lesson = nbformat.read(path, 4)
    where = nbformat.v4.new_code_cell("import zerolab\nprint(len(zerolab.__path__[0]))")
    lesson.cells.append(where)
    done = run(lesson, path)
    assert done.cells[-1].outputs[0].text == f"{len(str(handout / 'zerolab'))}\n"
    for cell, stored in zip(done.cells, nbformat.read(path, 4).cells, strict=False):
        if cell.id.startswith("check-"):
            assert cell.outputs == stored.outputs


def test_the_command_says_what_it_made(tmp_path, capsys):
    assert cli.main(["release", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "13 lessons" in out and "no solutions" in out


def expect_refused(target: Path, root: Path | None, words: str) -> None:
    before = files_of(target) if target.is_dir() else None
    with pytest.raises(ReleaseError, match=words) as refused:
        release(target, root)
    assert "\n" not in str(refused.value)
    assert (files_of(target) if target.is_dir() else None) == before, "nothing was written"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, clone):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    expect_refused(tmp_path / "full", clone, "not empty")
    expect_refused(tmp_path / "full" / "thesis.txt", clone, "is a file")
    expect_refused(clone / "lessons" / "out", clone, "outside of it")


def test_the_command_ends_with_two_and_one_sentence(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert cli.main(["release", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("zerolab release: ") and said.count("\n") == 1


def test_an_installed_package_says_that_a_clone_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zerolab.course.release.__file__", str(tmp_path / "a" / "b" / "c.py"))
    expect_refused(tmp_path / "out", None, "call zerolab release inside a clone")


def test_a_release_releases_nothing(handout, tmp_path):
    expect_refused(tmp_path / "out", handout, "no clone of the course")


def test_the_clone_is_found_from_inside_it(clone, monkeypatch):
    monkeypatch.chdir(clone)
    assert find_clone() == clone


def test_a_lesson_into_which_somebody_wrote_answers_is_not_handed_out(tmp_path, clone):
    (path,) = (clone / "lessons").glob("02_*")
    lesson = nbformat.read(path, 4)
    (cell,) = [cell for cell in lesson.cells if cell.id == "ex-02-1"]
    cell.source = cell.source.replace('raise NotImplementedError("your code here")', "return 42")
    nbformat.write(lesson, path)
    expect_refused(tmp_path / "out", clone, "ex-02-1.* is out of step")


def test_a_notebook_without_a_solution_is_not_handed_out(tmp_path, clone):
    shutil.copy(SOLUTIONS[4], clone / "lessons")
    expect_refused(tmp_path / "out", clone, "no solution to compare with")
