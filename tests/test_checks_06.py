"""The checks of lesson 06, run on real ranks: stub, solution, and near misses with their words."""

import pytest
import torch
from test_checks_04 import expect, stub

from zerolab import check, hint
from zerolab.course.checks.core import Wrong
from zerolab.course.checks.numbers import expect_bytes


@pytest.mark.parametrize("number", ["06.1", "06.2", "06.3", "06.4"])
@pytest.mark.parametrize("answer", [stub, None])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


def reduced(unit, comm):
    shard = torch.empty(len(unit.full_grads) // comm.world_size, dtype=unit.full_grads.dtype)
    comm.reduce_scatter(shard, unit.full_grads)
    return shard


def own_part(unit, comm):
    length = len(unit.full_grads) // comm.world_size
    return unit.full_grads[comm.rank * length : (comm.rank + 1) * length]


def keep(unit, shard):
    unit.grad_shard = shard if unit.grad_shard is None else unit.grad_shard + shard
    unit.full_grads = None


def solution(unit, comm):
    keep(unit, reduced(unit, comm))


def takes_a_quarter(unit, comm):
    shard = torch.empty(len(unit.full_grads) // 4, dtype=unit.full_grads.dtype)
    comm.reduce_scatter(shard, unit.full_grads)
    keep(unit, shard)


def keeps_the_whole(unit, comm):
    unit.kept = unit.full_grads
    solution(unit, comm)


def never_frees(unit, comm):
    whole = unit.full_grads
    solution(unit, comm)
    unit.full_grads = whole


def keeps_a_view(unit, comm):
    shard = own_part(unit, comm)
    comm.reduce_scatter(shard, unit.full_grads)
    if unit.grad_shard is not None:
        shard += unit.grad_shard
    unit.grad_shard, unit.full_grads = shard, None


def keeps_a_view_of_the_first(unit, comm):
    shard = own_part(unit, comm)
    comm.reduce_scatter(shard, unit.full_grads)
    unit.grad_shard = shard if unit.grad_shard is None else unit.grad_shard + shard
    unit.full_grads = None


def deletes(unit, comm):
    shard = reduced(unit, comm)
    unit.grad_shard = shard if unit.grad_shard is None else unit.grad_shard + shard
    del unit.full_grads


def all_reduces(unit, comm):
    comm.all_reduce(unit.full_grads)
    keep(unit, own_part(unit, comm).clone())


def sends_fp32(unit, comm):
    shard = torch.empty(len(unit.full_grads) // comm.world_size)
    comm.reduce_scatter(shard, unit.full_grads.float())
    keep(unit, shard.bfloat16())


def replaces(unit, comm):
    unit.grad_shard = reduced(unit, comm)
    unit.full_grads = None


def never_sums(unit, comm):
    keep(unit, own_part(unit, comm).clone())


def keeps_the_first_only(unit, comm):
    shard = reduced(unit, comm)
    keep(unit, shard if unit.grad_shard is None else torch.zeros_like(shard))


def divides(unit, comm):
    keep(unit, reduced(unit, comm) / comm.world_size)


def keeps_all_sums(unit, comm):
    comm.all_reduce(unit.full_grads)
    keep(unit, unit.full_grads)


def one_rank_skips(unit, comm):
    if comm.rank:
        solution(unit, comm)


def test_06_2_passes():
    expect("06.2", solution, 4, "passed")
    expect("06.2", deletes, 4, "passed")


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (takes_a_quarter, 0, "comm.world_size"),
        (keeps_the_whole, 2, "this is stage 1"),
        (keeps_a_view, 2, "this is stage 1"),
        (keeps_a_view_of_the_first, 2, "this is stage 1"),
        (never_frees, 0, "twice"),
        (all_reduces, 2, "sends half as much"),
        (sends_fp32, 2, "You sent fp32, which is twice the bytes"),
        (replaces, 0, "replaced the first"),
        (never_sums, 0, "never summed"),
        (keeps_the_first_only, 0, "the second was not added"),
        (divides, 0, "divided by N"),
        (keeps_all_sums, 0, "own shard alone"),
        (lambda unit, comm: None, 0, "is None"),
        (one_rank_skips, 0, "did not come back"),
        (lambda unit, comm: unit.gradients, 0, "AttributeError"),
    ],
)
def test_06_2_near_misses_are_named(answer, points, words):
    expect("06.2", answer, points, words)


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        ("06.1", 5.5, [(7, "stage 1"), (4, "stage 3"), (3.75, "eight ranks"), (3.5, "on top"),
                       (16, "plain data"), (22, "one rank's bytes")]),
        ("06.3", "70 GB", [("28 GB", "stage 1"), ("112 GB", "once a step"), ("35 GB", "elements"),
                           ("56 GB", "gradients alone"), ("168 GB", "stage 3"),
                           ("14 GB", "one pass"), (10, "for one parameter"),
                           ("71 GB", "rounded too coarsely")]),
        ("06.4", "48.75 GB", [("71.5 GB", "stage 1"), ("26 GB", "stage 3"), ("208 GB", "plain"),
                              ("22.75 GB", "what is divided"), ("390 GB", "all ranks together"),
                              ("42.25 GB", "master copy"), (3.75, "for one parameter")]),
    ],
)  # fmt: skip
def test_numbers_and_their_near_misses(number, right, wrong):
    expect(number, lambda: right, 1, "passed")
    for answer, words in wrong:
        expect(number, answer, 0, words)


def test_06_4_s_first_hint_leaves_the_numbers_to_the_last():
    first, last = hint("06.4").exercise.hints
    assert "14 bytes" in last and "14" not in first


def test_a_size_of_nothing_is_told_from_a_wrong_one():
    with pytest.raises(Wrong, match="too much"):
        expect_bytes("3 GB", 0, "sent", [])
    expect_bytes(0, 0, "sent", [])


@pytest.mark.parametrize("number", ["6.99", 6.4, [], None])
def test_an_exercise_that_does_not_exist_gets_the_nearest_names(number):
    with pytest.raises(ValueError, match=r"There is no exercise .* did you mean \d\d\.\d"):
        check(number, 1)
