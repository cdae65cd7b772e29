"""The checks of lesson 11: diagnoses, repairs on real ranks, and near misses with their words."""

import numpy as np
import pytest
import torch
from test_checks_04 import expect, stub
from test_checks_10 import AnyWord

from zerolab.course.faults import FAULTS, PATIENTS

GROUPS = {"11.1": range(1, 5), "11.2": range(5, 9), "11.3": range(9, 13)}


@pytest.mark.parametrize("number", [f"11.{n}" for n in range(1, 7)])
@pytest.mark.parametrize("answer", [stub, None])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


@pytest.mark.parametrize("number", GROUPS)
def test_right_diagnoses_pass_and_each_wrong_one_meets_a_symptom_that_speaks_against_it(number):
    right = {n: PATIENTS[n - 1] for n in GROUPS[number]}
    expect(number, lambda: right, 4, "passed")
    expect(number, right, 4, "passed")
    for patient in GROUPS[number]:
        for fault in set(FAULTS) - {PATIENTS[patient - 1]}:
            expect(number, right | {patient: fault}, 3, f"Patient {patient} is not", "; here ")


@pytest.mark.parametrize(
    ("fault", "guess", "words"),
    [
        ("a rank skips a collective", "a batch ends early on one rank", "here ranks wait in an"),
        ("the 1/N is forgotten", "the local norm is clipped", "rank to rank; here the"),
        ("stale parameters are gathered", "the 1/N is forgotten", "here the update scales with"),
        ("whole gradients are kept", "gradients are all-reduced", "here a rank holds more"),
        ("padding leaks into the norm", "tied weights are counted twice", "is not zero"),
        ("accumulation begins anew", "tied weights are counted twice", "here the norm is another"),
    ],
)  # fmt: skip
def test_the_symptom_that_is_named_is_the_telling_one(fault, guess, words):
    patient = 1 + PATIENTS.index(fault)
    number, group = next((n, g) for n, g in GROUPS.items() if patient in g)
    diagnoses = {n: PATIENTS[n - 1] for n in group} | {patient: guess}
    expect(number, diagnoses, 3, words)


def test_diagnoses_that_cannot_be_read_are_named():
    expect("11.1", lambda: 3, 0, "Return a dict")
    expect("11.1", {1: PATIENTS[0]}, 0, "Patient 2 has no diagnosis")
    names = {n: PATIENTS[n - 1] for n in range(1, 5)}
    expect("11.1", names | {2: "the 1/N is forgoten"}, 0, 'Did you mean "the 1/N is forgotten"')
    expect("11.1", names | {2: 7}, 0, "not in the list")
    expect("11.1", names | {2: [PATIENTS[1]]}, 0, "not in the list")
    expect("11.1", {str(n): fault for n, fault in names.items()}, 0, "as in {1: …}")
    expect("11.1", names | {2: AnyWord(PATIENTS[5])}, 0, "not in the list")
    expect("11.1", dict.fromkeys(range(1, 5), "whole gradients are kept"), 0, "0 of 4")


def squares(shard, comm):
    return comm.control_sum(shard.double().square().sum().view(1)).item()


def factor(shard, real, max_norm, comm):
    norm = squares(shard[:real], comm) ** 0.5 / comm.world_size
    return min(1.0, max_norm / norm) / comm.world_size


def clipped(max_norm, norm, comm):
    return min(1.0, max_norm / norm) / comm.world_size


def local(shard, real, max_norm, comm):
    norm = shard[:real].norm().item() / comm.world_size
    return min(1.0, max_norm / norm) / comm.world_size


def with_padding(shard, real, max_norm, comm):
    return factor(shard, len(shard), max_norm, comm)


def sum_of_norms(shard, real, max_norm, comm):
    norm = comm.control_sum(shard[:real].norm().view(1)).item() / comm.world_size
    return min(1.0, max_norm / norm) / comm.world_size


def largest_norm(shard, real, max_norm, comm):
    norms = torch.empty(comm.world_size)
    comm.all_gather(norms, shard[:real].norm().view(1))
    return min(1.0, max_norm / norms.max().item() * comm.world_size) / comm.world_size


def no_root(shard, real, max_norm, comm):
    norm = squares(shard[:real], comm) / comm.world_size
    return min(1.0, max_norm / norm) / comm.world_size


def of_the_sum(shard, real, max_norm, comm):
    return min(1.0, max_norm / squares(shard[:real], comm) ** 0.5) / comm.world_size


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (local, "norm of its own shard"),
        (with_padding, "leftovers"),
        (sum_of_norms, "norms cannot"),
        (largest_norm, "the largest"),
        (no_root, "root is missing"),
        (of_the_sum, "the norm of the sum"),
        (lambda s, r, m, c: factor(s, r, m, c) * 4, "1/N is missing"),
        (lambda s, r, m, c: of_the_sum(s, r, m, c) * 4, "nothing is to be clipped"),
        (lambda s, r, m, c: m / squares(s[:r], c) ** 0.5, "no gradient is blown up"),
        (lambda s, r, m, c: 0.25, "the mean, unclipped"),
        (lambda s, r, m, c: min(1.0, m / (157 / 4)) / 4, "the factor of rank 0"),
        (lambda s, r, m, c: 1 / 157 if m == 1 else 1 / c.world_size, "the factor of rank 0"),
        (lambda s, r, m, c: min(1.0, m / squares(s[:r], c) ** 0.5 * 4) / 4, "On three"),
        (lambda s, r, m, c: factor(s, r, m, c) / c.world_size, "divides by N twice"),
        (lambda s, r, m, c: clipped(m, (squares(s[:r], c) / c.world_size) ** 0.5, c), "its root"),
        (lambda s, r, m, c: squares(s[:r], c) ** 0.5 / c.world_size, "That is the norm"),
        (lambda s, r, m, c: clipped(m, c.control_sum(s[:r]).norm().item(), c), "the same length"),
        (lambda s, r, m, c: "0.25", "returns a str"),
        ("a factor", "Give the function itself"),
        (lambda s, r, m, c: None, "Return a number"),
        (lambda s, r, m, c: local(s, r, m, c) if c.rank == 0 else factor(s, r, m, c), "come back"),
    ],
)
def test_11_4_near_misses_are_named(answer, words):
    expect("11.4", answer, 0, words)


def common(own, comm):
    counts = torch.empty(comm.world_size, dtype=torch.int64)
    comm.all_gather(counts, torch.tensor([own]))
    return int(counts.min())


def counted(choose):
    def answer(own, comm):
        counts = torch.empty(comm.world_size, dtype=torch.int64)
        comm.all_gather(counts, torch.tensor([own]))
        return choose(counts)

    return answer


def four_written_out(own, comm):
    counts = torch.empty(4, dtype=torch.int64)
    comm.all_gather(counts, torch.tensor([own]))
    return int(counts.min())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda own, comm: own, "its own number"),
        (counted(lambda counts: int(counts.max())), "the richest"),
        (counted(lambda counts: int(counts[0])), "what rank 0 has"),
        (counted(lambda counts: int(counts.sum())), "Sum or mean"),
        (counted(lambda counts: int(counts.min()) - 1), "thrown away"),
        (counted(lambda counts: float(counts.min())), "a float"),
        (counted(lambda counts: int(counts.median())), "has only"),
        (counted(lambda counts: max(1, int(counts.min()))), "Rank 2 has only 0"),
        (four_written_out, "On three"),
        (lambda own, comm: min(own, 3), "The ranks disagree"),
        (3, "Give the function itself"),
        (lambda own, comm: 2, "With [4, 4, 4, 4]"),
        (lambda own, comm: common(own, comm) if comm.rank else own, "come back"),
    ],
)
def test_11_5_near_misses_are_named(answer, words):
    expect("11.5", answer, 0, words)


def test_repairs_pass():
    expect("11.4", factor, 3, "passed")
    expect("11.4", lambda *given: np.float32(factor(*given)), 3, "passed")
    expect("11.4", lambda *given: torch.tensor([factor(*given)]), 3, "passed")
    expect("11.5", common, 3, "passed")
    expect("11.5", counted(lambda counts: counts.min()), 3, "passed")
    expect("11.5", counted(lambda counts: counts.numpy().min()), 3, "passed")


def test_11_6_numbers():
    expect("11.6", lambda: 1.5, 1, "passed")
    for wrong, words in [(3, "60 ms, not 30"), (2, "the bound"), (0.667, "over the serial"),
                         (0.5, "communication"), (2.5, "2 at most"), (1, "gains")]:  # fmt: skip
        expect("11.6", wrong, 0, words)
