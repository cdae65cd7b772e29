"""What of a submission is run and judged: the release decides, and nothing of a learner is lost."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from zerolab import cli
from zerolab.course.checks import EXERCISES
from zerolab.course.grading import classroom, judges, report
from zerolab.course.grading.notebook import Graded, Result, result
from zerolab.course.grading.submission import (
    Cell,
    Judge,
    Lesson,
    Run,
    Unreadable,
    code_cells,
    plan,
    read,
)

LESSONS = list(classroom.lessons_in(classroom.released()))


def cell(name, source, answer=False):
    metadata = {"nbgrader": {"grade_id": name, "solution": True}} if answer else {}
    return {"cell_type": "code", "id": name, "metadata": metadata, "source": source}


STUB = 'def f(x):\n    raise NotImplementedError("your code here")'
RELEASE = {
    "cells": [
        cell("imports", "import math\nimport os\nlimit = 3\nother = print"),
        {"cell_type": "markdown", "id": "text", "metadata": {}, "source": "words"},
        cell("ex-1", STUB, answer=True),
        cell("check-1", 'check("05.1", f)'),
        cell("show", "print(f(limit))\nuseful = limit + 1"),
        cell("ex-2", STUB.replace("f(x)", "g(x)"), answer=True),
        cell("check-2", 'check("05.2", (f, g), learner)'),
    ]
}


def lesson(tmp_path):
    path = tmp_path / "05_release.ipynb"
    path.write_text(json.dumps(RELEASE))
    return Lesson.load(path)


def submitted(**changes):
    """The release with cells' sources changed; a name of a cell with None is removed."""
    cells = []
    for one in RELEASE["cells"]:
        name = one["id"].replace("-", "_")
        if name not in changes:
            cells.append(one)
        elif changes[name] is not None:
            cells.append({**one, "source": changes[name]})
    return {"cells": cells}


def ran(made):
    return [step.source for step in made.steps if isinstance(step, Run)]


def judged(made):
    return [(step.exercise, step.expression) for step in made.steps if isinstance(step, Judge)]


F, G = "def f(x):\n    return x * limit", "def g(x):\n    return math.sqrt(x)"


def test_answers_run_with_just_what_they_need_and_are_judged_in_order(tmp_path):
    made = plan(lesson(tmp_path), submitted(ex_1=F, ex_2=G))
    assert ran(made) == ["import math\nlimit = 3", F, G]
    assert judged(made) == [("05.1", "f"), ("05.2", "(f, g)")]
    assert made.notes == []


def test_locked_cells_run_as_they_were_released(tmp_path):
    made = plan(
        lesson(tmp_path),
        submitted(ex_1=F, ex_2=G, imports="limit = 99", check_1="2.0", show="os._exit(0)"),
    )
    assert ran(made)[0] == "import math\nlimit = 3"
    assert judged(made) == [("05.1", "f"), ("05.2", "(f, g)")]


def test_a_learner_s_own_cells_run_where_they_stand(tmp_path):
    nb = submitted(ex_1="def f(x):\n    return helper(x)", ex_2="def g(x): return useful")
    nb["cells"].insert(2, cell("mine", "helper = max"))
    made = plan(lesson(tmp_path), nb)
    assert ran(made).index("helper = max") < ran(made).index(nb["cells"][3]["source"])
    assert "useful = limit + 1" in ran(made), "a locked statement that the learner's cell needs"


def test_a_variable_inside_of_a_function_is_not_the_notebook_s(tmp_path):
    made = plan(
        lesson(tmp_path),
        submitted(ex_1="def f(x):\n    limit = 1\n    return limit", ex_2="def g(os): return os"),
    )
    assert ran(made)[0].startswith("def f"), "neither limit nor os is needed"


def test_a_missing_cell_costs_its_exercise_alone(tmp_path):
    made = plan(lesson(tmp_path), submitted(ex_1=None, ex_2=G))
    assert made.missing == {"05.1": "its cell (ex-1) is not in the notebook"}
    assert judged(made) == [("05.2", "(f, g)")]


def test_a_renamed_cell_is_found_by_its_function(tmp_path):
    nb = submitted(ex_1=None, ex_2=G)
    nb["cells"].append(cell("pasted", F))
    made = plan(lesson(tmp_path), nb)
    assert made.missing == {}
    assert ran(made).index(F) < ran(made).index(G)


def test_a_doubled_cell_counts_once_and_the_stub_never_wins(tmp_path):
    nb = submitted(ex_1=F, ex_2=G)
    nb["cells"].append(cell("ex-1", STUB, answer=True))
    made = plan(lesson(tmp_path), nb)
    assert ran(made).count(F) == 1
    assert STUB not in ran(made)
    assert made.notes == ["ex-1 is there 2 times; the last that is filled in counts"]


def test_reordered_cells_run_in_the_lesson_s_order(tmp_path):
    nb = submitted(ex_1=F, ex_2=G)
    nb["cells"].reverse()
    made = plan(lesson(tmp_path), nb)
    assert ran(made)[1:] == [F, G]
    assert judged(made) == [("05.1", "f"), ("05.2", "(f, g)")]
    assert "another order" in made.notes[0]


@pytest.mark.parametrize(
    "source",
    ["def f(:", "%timeit f(1)\nimport os", "!ls", "a" * 10**5, "(" * 5000, "x = '\\ud800'"],
)
def test_a_cell_that_cannot_be_parsed_is_run_all_the_same(tmp_path, source):
    made = plan(lesson(tmp_path), submitted(ex_1=source, ex_2=G))
    assert source in ran(made)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x, x):\n    return limit",
        "def f():\n    x = limit\n    global x",
        "x = " + " + ".join(["limit"] * 900),
    ],
    ids=["two parameters of one name", "late global", "deep"],
)
def test_what_parses_and_is_no_program_costs_its_own_exercise_alone(tmp_path, source):
    made = plan(lesson(tmp_path), submitted(ex_1=source, ex_2=G))
    assert source in ran(made)
    assert ran(made)[0] == "import math\nlimit = 3", "what it may need is there"


@pytest.mark.parametrize(
    "nb", [submitted(ex_1="x" * 2**20 + F), {"cells": [cell("ex-1", F)] * 2000}]
)
def test_generated_code_without_end_is_refused(tmp_path, nb):
    with pytest.raises(Unreadable, match="more code"):
        plan(lesson(tmp_path), nb)


def test_a_cell_that_looks_into_what_judges_it_is_remarked(tmp_path):
    spy = "def f(x):\n    import sys\n    return sys._getframe(1).f_locals['right']"
    made = plan(lesson(tmp_path), submitted(ex_1=spy, ex_2=G))
    assert made.notes == ["ex-1 names _getframe, f_locals: read it"]


@pytest.mark.parametrize("one", LESSONS, ids=lambda one: one.name)
def test_no_solution_and_no_untouched_lesson_is_remarked(one):
    for folder in ("lessons", "solutions"):
        path = classroom.released().parent / folder / f"{one.name}.ipynb"
        assert plan(one, read(path)).notes == []


def test_sources_as_lists_and_cells_without_ids_are_read(tmp_path):
    nb = submitted(ex_1=["def f(x):\n", "    return 1"], ex_2=G)
    for one in nb["cells"]:
        del one["id"]
    assert "def f(x):\n    return 1" in ran(plan(lesson(tmp_path), nb))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 10**5, "not JSON"),
        ("[]", "no cells"),
        ('{"cells": 3}', "no cells"),
        ('{"cells": [], "metadata": {"kernelspec": {"language": "R"}}}', "kernel runs R"),
        ('{"cells": [], "metadata": {"language_info": {"name": "julia"}}}', "kernel runs julia"),
    ],
)
def test_what_is_no_notebook_of_python_is_said_in_one_sentence(tmp_path, text, words):
    path = tmp_path / "x.ipynb"
    path.write_text(text)
    with pytest.raises(Unreadable, match=words):
        read(path)


@pytest.mark.parametrize(
    "cells", [[], [3, None, "x"], [{"cell_type": "code"}], [cell("other", "1")]]
)
def test_a_notebook_with_none_of_the_exercises_is_refused(tmp_path, cells):
    with pytest.raises(Unreadable, match="none of the exercises"):
        plan(lesson(tmp_path), {"cells": cells})


def test_every_exercise_of_the_course_is_judged_in_exactly_one_lesson():
    assert sorted(e for one in LESSONS for e in one.exercises) == sorted(EXERCISES)


def test_every_answer_cell_is_before_a_check():
    for one in LESSONS:
        names = [c.name for c in one.cells if c.answer or c.name in one.checks]
        assert names[-1] in one.checks


def test_a_release_whose_check_is_not_plain_is_refused(tmp_path):
    path = tmp_path / "05_x.ipynb"
    path.write_text(json.dumps({"cells": [cell("c", "check('05.1', f); 1")]}))
    with pytest.raises(ValueError, match="is not check"):
        Lesson.load(path)


# ---- which notebooks there are


def notebook(path: Path, name="05_zero_stage_1", time=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    source = next(classroom.released().glob(f"{name[:2]}_*.ipynb"))
    path.write_bytes(source.read_bytes())
    if time:
        os.utime(path, (time, time))


def found(folder):
    return {
        (s.student, s.lesson.name[:2] if s.lesson else s.refused.split(":")[0])
        for s in classroom.find_submissions(folder, LESSONS)
    }


def test_folders_and_flat_names_say_whose_notebook_it_is(tmp_path):
    notebook(tmp_path / "ada" / "05_zero_stage_1.ipynb")
    notebook(tmp_path / "bob" / "ps1" / "05_zero_stage_1.ipynb")
    notebook(tmp_path / "eve_05_zero_stage_1.ipynb")
    notebook(tmp_path / "kim" / "homework.ipynb", "07")
    notebook(tmp_path / ".ipynb_checkpoints" / "05_zero_stage_1.ipynb")
    assert found(tmp_path) == {("ada", "05"), ("bob", "05"), ("eve", "05"), ("kim", "07")}


def test_of_two_notebooks_of_a_learner_the_one_with_the_lesson_s_name_is_graded(tmp_path):
    notebook(tmp_path / "ada" / "05_zero_stage_1.ipynb", time=1_000_000)
    notebook(tmp_path / "ada" / "05_zero_stage_1-Copy1.ipynb", time=2_000_000)
    (graded,) = classroom.find_submissions(tmp_path, LESSONS)
    assert graded.path.stem == "05_zero_stage_1"
    assert graded.passed_over == ("05_zero_stage_1-Copy1.ipynb",)


def test_of_two_with_other_names_the_newer_is_graded(tmp_path):
    notebook(tmp_path / "ada" / "05_b.ipynb", time=1_000_000)
    notebook(tmp_path / "ada" / "05_a.ipynb", time=2_000_000)
    assert [s.path.stem for s in classroom.find_submissions(tmp_path, LESSONS)] == ["05_a"]


def test_a_folder_without_a_notebook_is_said(tmp_path):
    notebook(tmp_path / "ada" / "05_zero_stage_1.ipynb")
    (tmp_path / "bob").mkdir()
    (tmp_path / ".hidden").mkdir()
    refused = {s.student: s.refused for s in classroom.find_submissions(tmp_path, LESSONS)}
    assert refused == {"ada": "", "bob": "its folder holds no notebook"}


def test_a_notebook_of_something_else_is_refused_and_stops_nobody(tmp_path):
    notebook(tmp_path / "ada" / "05_zero_stage_1.ipynb")
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / "cooking.ipynb").write_text('{"cells": []}')
    (tmp_path / "eve").mkdir()
    (tmp_path / "eve" / "broken.ipynb").write_text("{")
    refused = {s.student: s.refused for s in classroom.find_submissions(tmp_path, LESSONS)}
    assert refused["ada"] == ""
    assert "none of this course's exercises" in refused["bob"]
    assert "not JSON" in refused["eve"]


def test_what_is_no_file_of_its_own_is_refused_and_never_waited_for(tmp_path):
    solution = classroom.released().parent / "solutions" / "05_zero_stage_1.ipynb"
    for student in ("ada", "bob", "eve", "kim", "max", "zoe"):
        (tmp_path / student).mkdir()
    name = "05_zero_stage_1.ipynb"
    (tmp_path / "ada" / name).symlink_to(solution)
    (tmp_path / "bob" / name).symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "eve" / name)
    (tmp_path / "kim" / name).mkdir()
    with (tmp_path / "max" / name).open("wb") as file:
        file.truncate(10**12)
    (tmp_path / "zoe" / "my work.ipynb").symlink_to(solution)
    (tmp_path / "link").symlink_to(solution.parent)
    store, said = classroom.Store(tmp_path / "parts"), {}
    for one in classroom.find_submissions(tmp_path, LESSONS):
        said[one.student] = one.refused
        if one.lesson:
            assert store.key(one, next(classroom.released().glob("05_*.ipynb"))) is None
            with pytest.raises(Unreadable) as refusal:
                read(one.path)
            said[one.student] = str(refusal.value)
    assert {name: words.split(":")[0] for name, words in said.items()} == {
        "ada": "it is a link", "bob": "it is a link", "eve": "it is no file",
        "kim": "it is no file", "max": "it has 1000000 MB", "zoe": "it is a link",
        "link": "its folder is a link, which is not followed",
    }  # fmt: skip


def test_names_and_reasons_move_no_cursor_and_can_be_written(tmp_path):
    name = "x\x1b[2J\n\udcff\u202e"
    notebook(tmp_path / os.fsdecode(b"x\x1b[2J\n\xff") / "05_zero_stage_1.ipynb")
    (one,) = classroom.find_submissions(tmp_path, LESSONS)
    assert one.student == r"x\x1b[2J\n\udcff"
    assert result("05.1", 0, name).reason == r"x\x1b[2J\n\udcff\u202e"
    assert len(result("05.1", 0, "x" * 10**6).reason) < 3000
    (odd,) = code_cells({"cells": [cell(name, "1")]})
    assert odd.name.isprintable()


@pytest.mark.parametrize("make", [False, True])
def test_no_folder_and_an_empty_one_are_said(tmp_path, make):
    folder = tmp_path / "in"
    if make:
        folder.mkdir()
    with pytest.raises(ValueError, match="holds no notebooks" if make else "is no folder"):
        classroom.find_submissions(folder, LESSONS)


def test_a_class_list_names_everybody(tmp_path):
    path = tmp_path / "class.csv"
    path.write_text("\ufeffstudent,name\nada,Ada\n bob ,Bob\n,\n", encoding="utf-8")
    assert classroom.read_class_list(path) == ["ada", "bob"]


@pytest.mark.parametrize(("text", "words"), [("name,mail\n", "only name, mail"), ("", "nothing")])
def test_a_class_list_without_the_column_is_refused(tmp_path, text, words):
    path = tmp_path / "class.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"no column student, {words}|{words}"):
        classroom.read_class_list(path)


# ---- tables and pages


def graded(student, points, **more):
    results = [Result("05.1", points, 1, 'because <b> & "quotes"')]
    return Graded(student, "05_zero_stage_1", points, 1, results, **more)


def test_the_table_has_a_row_for_everybody(tmp_path):
    rows = report.table([graded("bob", 1), graded("ada", 0.5, notes=["odd"])], ["zoe", "ada"])
    assert rows == [
        ["student", "05_zero_stage_1", "points", "max_points", "remarks"],
        ["ada", "0.5", "0.5", "1", "odd"],
        ["bob", "1", "1", "1", ""],
        ["zoe", "", "0", "1", "no notebook was handed in"],
    ]


def test_a_learner_s_id_is_never_a_formula(tmp_path):
    path = tmp_path / "grades.csv"
    report.write_csv(path, report.table([graded("=1+1", 1)]))
    with path.open(newline="") as file:
        assert list(csv.reader(file))[1][0] == "'=1+1"


def test_feedback_shows_text_as_text_and_stays_in_its_folder(tmp_path):
    report.write_feedback(tmp_path / "out", [graded("../x<script>", 1)])
    (page,) = (tmp_path / "out").iterdir()
    text = page.read_text()
    assert re.fullmatch(r"\.\._x_script_-[0-9a-f]{8}\.html", page.name)
    assert "because &lt;b&gt; &amp; &quot;quotes&quot;" in text
    assert "<script>" not in text


def test_nobody_s_page_replaces_another_s(tmp_path):
    names = ["a_b", "a b", "A_B", "é" * 100, "é" * 101]
    report.write_feedback(tmp_path, [graded(name, 1) for name in names])
    pages = [page.read_text() for page in tmp_path.iterdir()]
    assert len({page.name.casefold() for page in tmp_path.iterdir()}) == len(names)
    assert all(any(f"Feedback for {name}<" in page for page in pages) for name in names)


@pytest.mark.parametrize("name", ["+1", " =1", "\uff1d1", "@x"])
def test_no_other_beginning_of_a_formula_gets_through(tmp_path, name):
    report.write_csv(tmp_path / "grades.csv", [[name]])
    assert (tmp_path / "grades.csv").read_text(encoding="utf-8").startswith("'")


# ---- the command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-j", "0"], "at least 1"),
        (["--out", "nowhere/grades.csv"], "there is no folder"),
        (["--out", "in"], "must be a file"),
        (["--out", "x.parts"], "must be a file"),
        (["--out", "link.csv"], "must be a file"),
        (["--feedback", "class.csv"], "cannot be made into a folder"),
        (["--feedback", "class.csv/x"], "cannot be made into a folder"),
        (["--class", "class.csv"], "no column student"),
        (["--class", "nothing.csv"], "cannot be read"),
        (["--lessons", "in"], "holds no lessons"),
        (["--lessons", "odd"], "has an exercise 99.1"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_graded(
    tmp_path, monkeypatch, capsys, options, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(classroom, "grade_class", lambda *_: pytest.fail("it has begun"))
    notebook(tmp_path / "in" / "ada" / "05_zero_stage_1.ipynb")
    Path("class.csv").write_text("name\nada\n")
    Path("odd").mkdir()
    Path("link.csv").symlink_to(os.devnull)  # which the table would replace
    Path("odd/99_x.ipynb").write_text(json.dumps({"cells": [cell("c", "check('99.1', f)")]}))
    assert cli.main(["grade", "in", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("zerolab grade: ")
    assert words in said
    assert said.count("\n") == 1


def test_a_grade_that_cannot_be_kept_stops_the_run_and_is_never_left_out(tmp_path, monkeypatch):
    notebook(tmp_path / "in" / "ada" / "05_zero_stage_1.ipynb")
    found = classroom.find_submissions(tmp_path / "in", LESSONS)
    monkeypatch.setattr(judges.Worker, "grade", lambda *_: graded("ada", 1))
    (tmp_path / "parts").write_text("a file stands where the folder should be")
    with pytest.raises(RuntimeError, match="cannot be kept"):
        classroom.grade_class(found, classroom.released(), classroom.Store(tmp_path / "parts"))


def test_ctrl_c_while_the_workers_begin_ends_those_that_have_begun(tmp_path, monkeypatch):
    for student in ("ada", "bob"):
        notebook(tmp_path / "in" / student / "05_zero_stage_1.ipynb")
    found = classroom.find_submissions(tmp_path / "in", LESSONS)
    begun, ended = [], []

    class Interrupted(threading.Thread):
        def start(self):
            super().start()
            begun.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(judges.Worker, "grade", lambda *given: ended.append(given[-1].wait(20)))
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        classroom.grade_class(found, classroom.released(), classroom.Store(None))
    begun[0].join(30)
    assert (len(begun), ended) == (1, [True]), "it was told to stop"


def test_sigterm_keeps_the_grades_that_are_made(tmp_path, monkeypatch, capsys):
    for student in ("ada", "bob"):
        notebook(tmp_path / "in" / student / "05_zero_stage_1.ipynb")

    def grade(worker, one, lesson, release, stop):
        if one.student == "ada":
            return graded("ada", 1)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.wait(20)
        return None

    monkeypatch.setattr(judges.Worker, "grade", grade)
    out = tmp_path / "grades.csv"
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["grade", str(tmp_path / "in"), "-j", "1", "--out", str(out)]) == 130
    assert "stopped after 1 of 2; run it again to go on" in capsys.readouterr().err
    assert len(list((tmp_path / "grades.parts").iterdir())) == 1
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("given", [[], ["--out", "grades.csv"], ["--json"]])
@pytest.mark.parametrize("fault", ["a full disk", "a folder"])
def test_a_page_that_cannot_be_written_costs_no_grades(tmp_path, monkeypatch, capsys, given, fault):
    monkeypatch.chdir(tmp_path)
    notebook(Path("in/ada/05_zero_stage_1.ipynb"))
    monkeypatch.setattr(judges.Worker, "grade", lambda *_: graded("ada", 1))
    page = Path("pages/ada.html")
    page.parent.mkdir()
    page.symlink_to("/dev/full") if fault == "a full disk" else page.mkdir()
    assert cli.main(["grade", "in", "--feedback", "pages", *given]) == 2
    printed = capsys.readouterr()
    assert ("grades.csv" if "--out" in given else "ada") in printed.out
    assert printed.err.startswith(f"zerolab grade: the page {page} cannot be written: ")
    assert printed.err.count("\n") == 1


def test_a_judge_that_never_ends_costs_a_few_processes_and_what_was_judged_stands(
    tmp_path, monkeypatch
):
    notebook(tmp_path / "in" / "ada" / "05_zero_stage_1.ipynb")
    (one,) = classroom.find_submissions(tmp_path / "in", LESSONS)
    asked = []

    def ask(self, submission, release, done, clock, stop):
        asked.append([result.id for result in done])
        if len(asked) == 1:
            done.append(result("05.1", 1, "passed"))
        raise EOFError

    monkeypatch.setattr(judges.Worker, "_start", lambda _: None)
    monkeypatch.setattr(judges.Worker, "_ask", ask)
    made = judges.Worker().grade(one, one.lesson, Path(), threading.Event())
    assert len(asked) == judges.MOST_JUDGES < len(one.lesson.exercises)
    assert made.points == 1
    assert "did not come to an end" in made.exercises[1].reason
    assert "grader itself failed" in made.error


# ---- grades that stand already


def test_what_is_kept_is_found_again_and_a_torn_file_is_not(tmp_path):
    notebook(tmp_path / "in" / "ada" / "05_zero_stage_1.ipynb")
    (one,) = classroom.find_submissions(tmp_path / "in", LESSONS)
    release = next(classroom.released().glob("05_*.ipynb"))
    store = classroom.Store(tmp_path / "parts")
    key = store.key(one, release)
    assert store.load(key) is None
    store.save(key, graded("ada", 1))
    assert store.load(key) == graded("ada", 1)
    key.write_text(key.read_text()[:50])
    assert store.load(key) is None
    with one.path.open("a") as file:
        file.write(" ")
    assert store.key(one, release) != key, "an edited notebook is graded anew"


def test_nothing_is_kept_without_a_folder(tmp_path):
    store = classroom.Store(None)
    assert store.key(None, tmp_path) is None
    store.save(None, graded("ada", 1))
    assert list(tmp_path.iterdir()) == []


def test_the_release_s_cells_are_what_the_lessons_hold():
    five = next(one for one in LESSONS if one.name.startswith("05"))
    assert five.checks["check-05-4"] == ("05.4", "stage1_step")
    assert next(c.name for c in five.cells if c.answer) == "ex-05-1"
    assert isinstance(five.cells[0], Cell)
