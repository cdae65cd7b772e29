"""The checks of lesson 01: stub, solution, and near misses with their words."""

import pytest
import torch
from test_checks_04 import expect, stub

from zerolab.course.checks import lesson01, lesson03, lesson12
from zerolab.course.checks.lesson01 import QUESTIONS

QUIZZES = lesson01, lesson03, lesson12

RIGHT = {"bf16 bytes": 2, "all-reduce": 10, "reduce-scatter": 3, "AdamW": 2, "GB": 1e9,
         "GiB": 74.5, "averages": "gradients", "differs": "batch"}  # fmt: skip


@pytest.mark.parametrize("number", ["01.1", "01.2", "01.3"])
@pytest.mark.parametrize("answer", [stub, None, ...])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


def test_01_1_passes_and_an_empty_dict_is_no_attempt():
    expect("01.1", lambda: RIGHT, 8, "passed")
    expect("01.1", {**RIGHT, "GiB": "74.5", "averages": " The Gradients"}, 8, "passed")
    expect("01.1", dict, 0, "not attempted")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.key)
def test_01_1_every_known_slip_costs_its_point_and_has_its_own_words(question):
    assert len(set(question.slips.values())) == len(question.slips) >= 3
    for slip, words in question.slips.items():
        expect("01.1", {**RIGHT, question.key: slip}, 7, words)
    expect("01.1", {**RIGHT, question.key: 12345 if question.key in ("GB", "GiB") else "zebra"}, 7)


@pytest.mark.parametrize("question", [q for e in QUIZZES for q in e.QUESTIONS], ids=lambda q: q.key)
def test_no_slip_of_a_quiz_is_read_as_the_right_answer_or_as_another_slip(question):
    for slip, words in question.slips.items():
        assert question.problem(slip).endswith(words)


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        ({"GB": 1e9}, 1, "all-reduce: not answered yet"),
        ({**RIGHT, "fp32": 4}, 0, "no question 'fp32'"),
        ({**RIGHT, "GB": "10^9"}, 7, "is not a number. Write it as 1.5"),
        ({**RIGHT, "GiB": 75}, 7, "rounded too coarsely"),
        ({**RIGHT, "averages": "the losses"}, 7, "A loss is printed"),
        ({**RIGHT, "averages": "weight"}, 7, "The weights need no average"),
        ({**RIGHT, "differs": "training examples"}, 8, "passed"),
        ({**RIGHT, "averages": 3}, 7, "answer with a word"),
        ({**RIGHT, "differs": "hardware"}, 7, "What is parallel"),
        ({**RIGHT, "AdamW": 5}, 7, "one of its square"),
        (list(RIGHT.values()), 0, "dict of your answers"),
    ],
)
def test_01_1_other_answers_are_met(answer, points, words):
    expect("01.1", answer, points, words)


def test_01_2_number_and_near_misses():
    expect("01.2", lambda: 24, 1, "passed")
    for wrong, words in [(16, "once"), (32, "large-N"), (12, "one of the two halves"),
                         (48, "everything to everybody"), (6, "6 is numbers"),
                         (96, "one rank's bytes"), (64, "does one send")]:  # fmt: skip
        expect("01.2", lambda wrong=wrong: wrong, 0, words)


def total_of(values, comm):
    total = values.clone()
    comm.all_reduce(total)
    return total


def mean(values, comm):
    return total_of(values, comm) / comm.world_size


def in_place(values, comm):
    comm.all_reduce(values)
    return values / comm.world_size


def gathers(values, comm):
    every = torch.empty(comm.world_size * len(values))
    comm.all_gather(every, values)
    return every.view(comm.world_size, -1).mean(0)


def of_a_copy_that_is_lost(values, comm):
    comm.all_reduce(values / comm.world_size)
    return values.clone()


def twice(values, comm):
    return total_of(total_of(values, comm), comm) / comm.world_size**2


def on_rank_0_alone(values, comm):
    result = mean(values, comm)
    return result if comm.rank == 0 else None


def one_skips(values, comm):
    return mean(values, comm) if comm.rank else values


def test_01_3_asks_for_no_mean_that_is_small_beside_what_is_added_up():
    for seed in range(100):
        for key in lesson01._keys(seed).values():
            assert key.mean.min() > key.values.max() / 3


def test_01_3_passes():
    expect("01.3", mean, 3, "passed")
    expect("01.3", lambda values, comm: total_of(values / comm.world_size, comm), 3, "passed")


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (total_of, 0, "That is the sum"),
        (lambda v, comm: total_of(v / 4, comm) / 4, 0, "divided twice"),
        (lambda v, comm: v, 0, "this rank's own values"),
        (of_a_copy_that_is_lost, 0, "in the tensor that was reduced"),
        (lambda v, comm: v / comm.world_size, 0, "nothing was summed"),
        (lambda v, comm: v.mean().expand(12), 0, "not over ranks"),
        (lambda v, comm: v.mean(), 0, "shape ()"),
        (lambda v, comm: mean(v, comm) + 1, 0, "then divide"),
        (lambda v, comm: mean(v, comm).tolist(), 0, "a list"),
        (in_place, 2, "give it a copy"),
        (gathers, 2, "to add them here"),
        (twice, 2, "a second one"),
        (on_rank_0_alone, 0, "Rank 1 returned nothing"),
        (one_skips, 0, "did not come back"),
        (lambda v, comm: comm.mean(v), 0, "AttributeError"),
    ],
)
def test_01_3_near_misses_are_named(answer, points, words):
    expect("01.3", answer, points, words)
