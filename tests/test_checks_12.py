"""The checks of lesson 12: stub, solution, and near misses with their words."""

import pytest
from test_checks_04 import expect, stub

from zerolab.course.checks.lesson12 import CASES, FIRST_MISSTEPS, QUESTIONS, _first, _planned
from zerolab.theory.memory import held as derived
from zerolab.theory.memory import held_bytes
from zerolab.theory.notation import N_d, Psi
from zerolab.theory.plan import plan

RIGHT = {"ZeRO-1 limit": 4, "ZeRO-2 limit": 8, "stage 3 traffic": "3/2", "divided by N": "states",
         "stage 1 by all-reduce": 1.5, "stage 2, A = 4": 2.5, "ZeRO-Offload": "CPU"}  # fmt: skip


@pytest.mark.parametrize("number", ["12.1", "12.2", "12.3"])
@pytest.mark.parametrize("answer", [stub, None, ...])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


def test_12_1_passes():
    expect("12.1", lambda: RIGHT, 7, "passed")
    expect("12.1", RIGHT | {"ZeRO-Offload": "CPU RAM", "divided by N": "model state"}, 7, "passed")
    expect("12.1", RIGHT | {"ZeRO-1 limit": 2.9}, 6, "That is the value for 8 ranks")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.key)
def test_12_1_every_known_slip_costs_its_point_and_is_named(question):
    for slip, words in question.slips.items():
        expect("12.1", {**RIGHT, question.key: slip}, 6, words)
    other = "zebra" if isinstance(question.right, tuple) else 77
    expect("12.1", {**RIGHT, question.key: other}, 6, question.otherwise)


def held(stage, n, k=12):
    return [4 + k, 4 + k / n, 2 + (2 + k) / n, (4 + k) / n][stage]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda s, n: [1, 3, 4, n][s], "rounded"),
        (lambda s, n: [1, 2.9, 4.3, n][s], "for 8 ranks"),
        (lambda s, n: [1, 4, 8, n][s], "no number of ranks reaches"),
        (lambda s, n: held(s, n) / 16, "turn it over"),
        (lambda s, n: held(s, n), "bytes per parameter"),
        (lambda s, n: 12 / held(s, n, 8), "K is 12"),
        (lambda s, n: 16 / held(1 if s == 2 else s, n), "the gradients as well"),
        (lambda s, n: 16 / [16, 4 + 12 / n, 14 + 2 / n, 16 / n][s], "includes stage 1"),
        (lambda s, n: n if s else 1, "Only stage 3"),
        (lambda s, n: 5, "16 over"),
        (lambda s, n: print(end=""), "print shows a value"),
        (lambda s, n: 16 * Psi / sum(derived(s).values()).subs(N_d, n), "the package's own"),
        (lambda s, n: "2.9x", "Return a number"),
        (lambda s, n: held[s], "TypeError"),
    ],
)
def test_12_2_near_misses_are_named(answer, words):
    expect("12.2", lambda s, n: 16 / held(s, n), 2, "passed")
    expect("12.2", answer, 0, words)


def first_stage(params, ranks, gpu_gb, other_gb, k=12, stages=range(4)):
    for stage in stages:
        if params * held(stage, ranks, k) + other_gb * 1e9 <= gpu_gb * 1e9:
            return stage
    return None


def test_12_3_passes_and_the_planner_agrees_in_every_case():
    expect("12.3", first_stage, 4, "passed")
    assert [_planned(*case) for case in CASES] == [first_stage(*case) for case in CASES]
    assert {_planned(*case) for case in CASES} == {0, 1, 2, 3, None}


def test_12_3_the_cases_tell_all_known_missteps_from_the_right_answer_and_each_other():
    rows = [tuple(wrong(*case) for case in CASES) for wrong, _ in FIRST_MISSTEPS]
    rows.append(tuple(_first(*case) for case in CASES))
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, n, g, o: 3, "Stage 3 always"),
        (lambda p, n, g, o: first_stage(p, n, g, o, stages=[3, 2, 1, 0]), "Begin at 0"),
        (lambda p, n, g, o: first_stage(p, n, g * 2**30 / 1e9, o), "for GiB"),
        (lambda p, n, g, o: first_stage(p * 1e9 / 2**30, n, g, o), "take one unit"),
        (lambda p, n, g, o: first_stage(p, n, g, 0), "need other_gb"),
        (lambda p, n, g, o: first_stage(p, n, g, o / n), "a batch of its own"),
        (lambda p, n, g, o: first_stage(p, n, g - 1e-7, o), "still fits"),
        (lambda p, n, g, o: first_stage(p, n, g, o, k=8), "K is 12"),
        (lambda p, n, g, o: first_stage(p, n, g, o) if first_stage(p, n, g, o) is not None else 3,
         "say None"),
        (lambda p, n, g, o: 0 if 16 * p / n <= (g - o) * 1e9 else None, "together"),
        (lambda p, n, g, o: first_stage(p, n, n * g, o), "together"),
        (lambda *c: -1 if first_stage(*c) is None else first_stage(*c), "return None"),
        (lambda *c: None, "by hand"),
        (lambda p, n, g, o: first_stage(p, n, g, o, stages=[0, 3]), "at once"),
        (lambda p, n, g, o: 1, "by hand"),
        (lambda p, n, g, o: int(plan(p, n, 0).held["total"] > (g - o) * 1e9), "the package's own"),
        (lambda p, n, g, o: held_bytes(0, n, p)["total"], "the package's own"),
        (lambda p, n, g, o: p.fits, "AttributeError"),
        (lambda p, n: 0, "TypeError"),
    ],
)  # fmt: skip
def test_12_3_near_misses_are_named(answer, words):
    expect("12.3", answer, 0, words)
