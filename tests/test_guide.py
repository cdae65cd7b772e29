"""The instructor's guide says what the lessons and the checks say, and its plans add up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

from zerolab import check
from zerolab.course.checks import EXERCISES
from zerolab.course.outline import LESSONS
from zerolab.course.pretend import BROKEN
from zerolab.course.pretend_hostile import CHEATS, HARM

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guide"
PAGES = sorted(GUIDE.glob("lesson_*.md"))
CHECKS = ROOT / "zerolab" / "course" / "checks"
NUMBER = re.compile(r"(?<![`\"\d])\b(?:0\d|1[0-3])\.\d{1,2}\b")


def lessons_of(page: Path) -> list[str]:
    """The numbers of the lessons that a page is about, from its links."""
    return sorted(set(re.findall(r"lessons/(\d\d)_", page.read_text())))


def source_of(number: str) -> str:
    (path,) = (ROOT / "solutions").glob(f"{number}_*.ipynb")
    return "\n".join(cell.source for cell in nbformat.read(path, 4).cells)


def minutes_of_exercises() -> dict[str, int]:
    """As the lessons state them; lesson 13 has a heading and then the minutes."""
    found = {}
    for number in LESSONS:
        text = source_of(number)
        found |= dict(re.findall(r"\*\*Exercise (\d\d\.\d+)\*\* \((\d+) minutes", text))
        found |= dict(re.findall(r"^### (13\.\d+) .*\n\n\*\w+, (\d+) minutes", text, re.M))
    return {exercise: int(minutes) for exercise, minutes in found.items()}


def rows(text: str, columns: int) -> list[list[str]]:
    """The rows of all tables with so many columns, without their heads."""
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in found]
    return [row for row in cells if len(row) == columns and row[0] not in ("minutes", "exercise")]


def wrong_answers() -> list[tuple[str, str, str]]:
    """(exercise, answer, quoted words of the check) of every page."""
    found = []
    for page in PAGES:
        _, _, part = page.read_text().partition("## Wrong answers")
        for exercise, answer, says, _ in rows(part.partition("\n## ")[0], 4):
            assert says.startswith('"') and says.endswith('"'), says
            found.append((exercise, answer, says.strip('"')))
    return found


def test_every_lesson_has_a_page_and_the_front_page_links_it():
    assert sorted(n for page in PAGES for n in lessons_of(page)) == sorted(LESSONS)
    front = (GUIDE / "index.md").read_text()
    for page in PAGES:
        assert f"({page.name})" in front
    assert "docs/guide/index.md" in (ROOT / "README.md").read_text()


def test_every_exercise_states_its_minutes():
    assert set(minutes_of_exercises()) == set(EXERCISES)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_plan_adds_up_and_leaves_an_exercise_its_minutes(page):
    minutes = minutes_of_exercises()
    plans = re.findall(r"^## (\d+) minutes\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert [total for total, _ in plans] == (["50"] if "12" in page.stem else ["50", "90"])
    for total, text in plans:
        planned = rows(text, 2)
        assert sum(int(row[0]) for row in planned) == int(total)
        for given, what in planned:
            needed = sum(minutes[exercise] for exercise in NUMBER.findall(what))
            assert needed <= int(given), f"{what}: the lesson states {needed} minutes"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_minutes_and_questions_are_those_of_the_outline(page):
    text = page.read_text()
    for number in lessons_of(page):
        lesson = LESSONS[number]
        assert f"{lesson.stem}.ipynb" in text
        if len(lessons_of(page)) == 1:
            assert lesson.question in text
            assert f"{lesson.minutes} minutes" in text
        else:
            assert re.search(rf"{lesson.name}\]\S+ \({lesson.minutes}[ )]", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_exercise_and_long_number_is_in_the_lesson(page):
    text = page.read_text()
    known = "\n".join(source_of(number) for number in lessons_of(page)).replace("_", ",")
    for exercise in NUMBER.findall(text):
        assert exercise in EXERCISES, exercise
    for number in re.findall(r"\b\d{1,3}(?:,\d{3})+\b", text):
        assert number in known, number


def words_of(number: str) -> str:
    """All that the checks of a lesson can say, without what they put in."""
    said = []
    for path in [*CHECKS.glob(f"lesson{number}*.py"), *CHECKS.glob("o*.py"), *CHECKS.glob("n*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    return "\n".join(said)


@pytest.mark.parametrize(("exercise", "answer", "words"), wrong_answers())
def test_a_check_says_what_the_guide_quotes(exercise, answer, words):
    code = re.fullmatch(r"`(.+)`", answer)
    if code and not code[1].startswith("scale"):
        value = eval(code[1])
        verdict = check(exercise, lambda: value)
        assert words in str(verdict), str(verdict)
        assert verdict.status == "not yet"
    else:
        assert words in words_of(exercise[:2])


def test_the_front_page_counts_the_pretended_class_right():
    words = dict(
        zip((5, 7, 9), ("five that cheat", "seven that would do harm", "nine"), strict=True)
    )
    front = (GUIDE / "index.md").read_text()
    for kinds in (CHEATS, HARM, BROKEN):
        assert words[len(kinds)] in front


def test_points_that_the_guide_promises_are_those_of_the_exercise():
    for page in PAGES:
        for exercise, points in re.findall(
            r"After (\d\d\.\d+).*?passed with (\d+) points", page.read_text()
        ):
            assert EXERCISES[exercise].points == int(points)


@pytest.mark.parametrize("page", [*PAGES, GUIDE / "index.md"], ids=lambda p: p.stem)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link
