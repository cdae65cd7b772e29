"""Every published figure that can be derived is reproduced to its printed digits."""

import re

import pytest

from zerolab.course.oracles import EXCLUDED, Oracle, as_printed, disagreements, rows

TABLE = rows()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.source}: {row.what}")
def test_ours_has_the_published_digits(row):
    assert row.printed == row.published


def test_all_papers_exercises_and_cases_are_there():
    sources = " | ".join(row.source for row in TABLE)
    papers = ("ZeRO table 1", "ZeRO figure 1", "ZeRO table 2", "ZeRO-Offload", "ZeRO-Infinity")
    cases = (
        "A1 A2 A4 A7 A9 A10 A11 A13 A15 A16 B1 B2 B4 B5 B7 B12 C2 C3 C5 C7 D2 D4 D5 D7 D8 D10 "
        "D11 E1 E3 E5 E6 F4"
    )
    exercises = [f"exercise {n}" for n in range(1, 6)]
    for name in (*papers, *exercises, *(f"case {case}" for case in re.findall(r"\w+", cases))):
        assert name in sources
    assert sum(len(row.ours) for row in TABLE) > 200
    assert all(why for _, why in EXCLUDED)


def test_rounding_follows_the_source():
    assert as_printed(41.25, "41.3") == "41.3", "decimals round half up"
    assert as_printed(2218.75, "2218", cut_whole=True) == "2218", "table 1 cuts whole numbers off"
    assert as_printed(2218.75, "2218") == "2219"
    assert as_printed(15.625, "15.6", cut_whole=True) == "15.6"


def test_a_wrong_figure_is_found():
    wrong = Oracle("nobody", "GB", "41.3 7", (41.25, 8))
    assert disagreements([*TABLE[:2], wrong]) == [wrong]
