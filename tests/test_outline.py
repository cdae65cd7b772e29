"""The outline, the README, the notebooks and the errata say the same of the course."""

import re
from pathlib import Path

import nbformat
import pytest
import sympy as sp

from zerolab.course.errata import ERRATA, GAP, IMPRECISE, VERDICTS, WRONG, errata
from zerolab.course.outline import LESSONS, CourseMap, table_row
from zerolab.theory.memory import RECIPES, held
from zerolab.theory.notation import N_d, Psi
from zerolab.theory.traffic import sent

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = [lesson for lesson in LESSONS.values() if lesson.minutes]


def test_thirteen_lessons_and_exactly_the_written_ones_have_notebooks():
    assert list(LESSONS) == [f"{number:02}" for number in range(1, 14)]
    there = {path.stem for path in (ROOT / "solutions").glob("*.ipynb")}
    assert there == {lesson.stem for lesson in WRITTEN}


@pytest.mark.parametrize("lesson", WRITTEN, ids=lambda lesson: lesson.stem)
def test_a_notebook_has_the_question_and_the_minutes_of_the_outline(lesson):
    nb = nbformat.read(ROOT / "lessons" / f"{lesson.stem}.ipynb", 4)
    title, _, words = nb.cells[0].source.partition("\n")
    assert title == f"# {lesson.question}"
    assert f"**Lesson {lesson.number}: " in words
    assert f"About {lesson.minutes} minutes." in words


def test_the_readme_lists_exactly_the_written_lessons_as_the_outline_has_them():
    rows = re.findall(r"^\| \[\d\d .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [table_row(lesson, "lessons/") for lesson in WRITTEN]


def test_the_map_links_what_is_there_and_names_the_rest():
    shown = CourseMap()._repr_markdown_()
    for lesson in LESSONS.values():
        assert (f"({lesson.stem}.ipynb)" in shown) == bool(lesson.minutes)
        assert lesson.question in shown and lesson.question in repr(CourseMap())


# the lecture's claims that are wrong, imprecise or missing, as they are numbered there
WRONG_ROWS = {3, 8, 11, 16, 17, 21, 23, 25, 26, 28, 32, 33, 36}
IMPRECISE_ROWS = {4, 10, 12, 14, 15, 18, 20, 22, 24, 30, 31, 35}


def test_every_wrong_or_imprecise_claim_has_its_row():
    found = {verdict: {int(n) for n, row in ERRATA.items() if row.verdict == verdict}
             for verdict in VERDICTS}  # fmt: skip
    assert found == {WRONG: WRONG_ROWS, IMPRECISE: IMPRECISE_ROWS, GAP: {37}}
    assert errata().count() == {WRONG: 13, IMPRECISE: 12, GAP: 1}


@pytest.mark.parametrize("row", ERRATA.values(), ids=lambda row: row.number)
def test_a_row_is_complete_and_names_a_lesson_of_the_course(row):
    assert row.lesson in LESSONS and row.section in range(14)
    assert row.claim and row.right and row.source and row.right != row.claim
    announced = not LESSONS[row.lesson].minutes
    assert (f"{row.lesson} (announced)" in errata()._repr_markdown_()) == announced


def bytes_per_parameter(stage, ranks):
    return sum(held(stage).values()).subs(N_d, ranks) / Psi


def test_the_numbers_in_the_rows_are_those_of_the_theory():
    k, all_bytes = RECIPES["adamw-mixed"].K, RECIPES["adamw-mixed"].total
    volume = {stage: sum(sent(stage).values()) / Psi for stage in (0, 1, 2, 3, "lecture-stage-1")}
    ratio = {stage: float(volume[stage] / volume[0]) for stage in volume}
    for number, words in {
        "3": (f"{k * 70} GB", f"{all_bytes * 70:,} GB"),
        "8": (f"{volume['lecture-stage-1']}Ψ bytes", f"{ratio['lecture-stage-1']} times"),
        "10": ("(A + 1)Ψ elements against 2Ψ",),
        "11": (f"{volume[2]}Ψ bytes",),
        "14": (f"{float(bytes_per_parameter(3, 64) * 70)} GB", f"{all_bytes * 70:,} GB"),
        "15": (f"{volume[3]}Ψ bytes",),
        "16": (f"{volume[3]}Ψ bytes against {volume[0]}Ψ bytes: {ratio[3]} times",),
        "17": (f"{ratio[3]} times",),
        "20": ("28 TB at 25 GB/s",),
        "22": ("4Ψ",),
        "32": (f"{ratio[3]} times",),
        "33": ("at most 2 times",),
        "35": (
            *(f"{float(all_bytes / bytes_per_parameter(stage, 8)):.3g} times" for stage in (1, 2)),
            *(str(sp.limit(all_bytes / bytes_per_parameter(s, N_d), N_d, sp.oo)) for s in (1, 2)),
        ),
    }.items():
        for word in words:
            assert word in ERRATA[number].right, number


def test_errata_can_be_read_by_verdict_and_by_lesson_and_in_a_terminal():
    assert {row.number for row in errata(lesson="07").rows} == {"12", "14", "15", "16"}
    assert len(errata(WRONG).rows) == 13
    assert repr(errata()).count("Right: ") == len(ERRATA)
    with pytest.raises(ValueError, match="wrong"):
        errata("wrung")
    with pytest.raises(ValueError, match="Lesson '14' is not known"):
        errata(lesson="14")
