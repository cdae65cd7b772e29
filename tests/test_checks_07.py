"""The checks of lesson 07, run on real ranks: stub, solution, and near misses with their words."""

import re
from fractions import Fraction

import pytest
import torch
from test_checks_04 import expect, stub

from zerolab.course.checks.core import find


@pytest.mark.parametrize("number", ["07.1", "07.2", "07.3", "07.4"])
def test_the_empty_stub_fails_and_is_called_not_attempted(number):
    expect(number, (stub, stub) if number == "07.3" else stub, 0, "not attempted")
    expect(number, None, 0, "not attempted")


def whole_weight(shard, shape, comm):
    flat = torch.empty(len(shard) * comm.world_size)
    comm.all_gather(flat, shard)
    return flat[: shape[0] * shape[1]].view(shape)


def flat_grad(grad, shard, comm):
    flat = torch.zeros(len(shard) * comm.world_size)
    flat[: grad.numel()] = grad.flatten()
    return flat


def reduced(flat, shard, comm):
    grad_shard = torch.empty_like(shard)
    comm.reduce_scatter(grad_shard, flat)
    return grad_shard


def forward(x, shard, shape, comm):
    return x @ whole_weight(shard, shape, comm).T


def backward(grad_y, x, shard, shape, comm):
    grad_x = grad_y @ whole_weight(shard, shape, comm)
    return grad_x, reduced(flat_grad(grad_y.T @ x, shard, comm), shard, comm)


kept: dict = {}


def forward_that_keeps(x, shard, shape, comm):
    kept[shape] = whole_weight(shard, shape, comm)
    return x @ kept[shape].T


def backward_from_kept(grad_y, x, shard, shape, comm):
    return grad_y @ kept[shape], reduced(flat_grad(grad_y.T @ x, shard, comm), shard, comm)


def all_reduces(grad_y, x, shard, shape, comm):
    flat = flat_grad(grad_y.T @ x, shard, comm)
    comm.all_reduce(flat)
    own = flat[comm.rank * len(shard) :][: len(shard)].clone()
    return grad_y @ whole_weight(shard, shape, comm), own


def keeps_a_view(grad_y, x, shard, shape, comm):
    flat = flat_grad(grad_y.T @ x, shard, comm)
    own = flat[comm.rank * len(shard) :][: len(shard)]
    comm.reduce_scatter(own, flat)
    return grad_y @ whole_weight(shard, shape, comm), own


def leaves_padding(grad_y, x, shard, shape, comm):
    grad_x = grad_y @ whole_weight(shard, shape, comm)
    flat = torch.full((len(shard) * comm.world_size,), 3.0)
    flat[: shape[0] * shape[1]] = (grad_y.T @ x).flatten()
    return grad_x, reduced(flat, shard, comm)


def swaps(*arguments):
    return backward(*arguments)[::-1]


def never_sums(grad_y, x, shard, shape, comm):
    flat = flat_grad(grad_y.T @ x, shard, comm)
    own = flat[comm.rank * len(shard) :][: len(shard)].clone()
    return grad_y @ whole_weight(shard, shape, comm), own


def divides(*arguments):
    grad_x, grad_shard = backward(*arguments)
    return grad_x, grad_shard / 4


def whole_gradient(grad_y, x, shard, shape, comm):
    return grad_y @ whole_weight(shard, shape, comm), grad_y.T @ x


def forgets_padding(grad_y, x, shard, shape, comm):
    whole_weight(shard, shape, comm)
    return grad_y, reduced((grad_y.T @ x).flatten(), shard, comm)


def transposed(grad_y, x, shard, shape, comm):
    grad_x = grad_y @ whole_weight(shard, shape, comm)
    return grad_x, reduced(flat_grad(x.T @ grad_y, shard, comm), shard, comm)


def gathers_four(x, shard, shape, comm):
    flat = torch.empty(len(shard) * 4)
    comm.all_gather(flat, shard)
    return x @ flat[: shape[0] * shape[1]].view(shape).T


def uses_the_shard(x, shard, shape, comm):
    return x @ shard[: shape[0] * shape[1]].view(shape).T


def wrong_shape(x, shard, shape, comm):
    return x @ whole_weight(shard, shape[::-1], comm)


def test_07_3_passes():
    expect("07.3", (forward, backward), 5, "passed")
    expect("07.3", [forward, backward], 5, "passed")


@pytest.mark.parametrize("answer", ["3/2", "1.5x", Fraction(3, 2), 1.5])
def test_07_4_reads_a_ratio_as_people_write_it(answer):
    expect("07.4", answer, 1, "passed")
    expect("07.4", "1e400", 0)


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        ((forward_that_keeps, backward_from_kept), 3, "not stage 3"),
        ((forward, all_reduces), 3, "An all-reduce"),
        ((forward, never_sums), 0, "never summed"),
        ((forward, divides), 0, "divided by N"),
        ((forward, keeps_a_view), 3, "memory of its own"),
        ((forward, leaves_padding), 0, "padding must be zero"),
        ((forward, swaps), 0, "in this order"),
        ((forward, whole_gradient), 0, "own shard alone"),
        ((forward, forgets_padding), 0, "Pad it first"),
        ((forward, transposed), 0, "grad_y.T @ x"),
        ((gathers_four, backward), 0, "comm.world_size"),
        ((uses_the_shard, backward), 0, "invalid for input"),
        ((wrong_shape, backward), 0, "y = x @ weight.T"),
        ((forward, lambda *_: None), 0, "two tensors"),
        (forward, 0, "Two functions"),
    ],
)
def test_07_3_near_misses_are_named(answer, points, words):
    expect("07.3", answer, points, words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((forward, stub), "not yet.*forward are right; backward is still the stub.$"),
        ((forward_that_keeps, stub), "backward is still the stub.*alive after forward"),
        ((wrong_shape, stub), "not yet.*y = x @ weight.T"),
        ((stub, backward), "not attempted"),
    ],
)
def test_07_3_forward_alone_is_judged(answer, words):
    said = str(expect("07.3", answer, 0)).replace("\n", " ")
    assert re.search(words, said), said


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        ("07.1", "17.5 GB", [("1120 GB", "plain"), ("155.3 GB", "stage 2"), ("293.1 GB", "stage 1"),
                             ("13.125 GB", "optimizer states alone"), (0.25, "one parameter"),
                             ("16.3 GB", "GiB"), ("2.19 GB", "parameters alone"),
                             ("18 GB", "rounded too coarsely"), ("17 GB", "rounded too coarsely"),
                             ("19 GB", "too much"), ("20 GB", "too much")]),
        ("07.2", 12 * 12288**2 * 2, [(12 * 12288**2, "number of parameters"),
                                     (12 * 12288**2 * 16, "never travel"),
                                     (12 * 12288**2 * 4, "16-bit"),
                                     (12 * 12288**2 * 2 * 96, "whole model"),
                                     (12 * 12288**2 * 2 / 1024, "a shard")]),
        ("07.4", 1.5, [(3, "not in the same unit"), (6, "divide by"), (2, "4Ψ over 2Ψ"),
                       (2 / 3, "over stage 3"), (1, "once more")]),
    ],
)  # fmt: skip
def test_numbers_and_their_near_misses(number, right, wrong):
    expect(number, lambda: right, 1, "passed")
    for answer, words in wrong:
        expect(number, answer, 0, words)


def test_neither_title_nor_hint_gives_the_answer_away():
    assert not re.search(r"half|1\.5|three times", find("07.4").title, re.IGNORECASE)
    assert "12,288" not in find("07.2").hints[0]
