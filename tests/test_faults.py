"""Patients: each fault shows on live ranks what is said of it, and nothing else."""

import pytest

from zerolab import World
from zerolab.course.faults import FAULTS, NORMAL, PATIENTS, Ward, run_fault, seen


@pytest.fixture(scope="module")
def ward():
    with World(4, timeout=300) as world:
        yield Ward(world)


@pytest.fixture(scope="module")
def healthy(ward):
    return run_fault(ward.world, "")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_on_live_ranks_what_is_said_of_it(ward, healthy, fault):
    assert seen(healthy, run_fault(ward.world, fault)) == FAULTS[fault]


def test_a_healthy_run_shows_nothing_and_repeats_itself(ward, healthy):
    again = run_fault(ward.world, "")
    assert seen(healthy, again) == {}
    assert [r.weights for r in again.ranks] == [r.weights for r in healthy.ranks]
    assert not again.waits


def test_every_patient_has_one_fault_and_no_two_show_the_same():
    assert sorted(PATIENTS) == sorted(FAULTS) and len(FAULTS) == 12
    assert len({tuple(sorted(shows.items())) for shows in FAULTS.values()}) == len(FAULTS)
    assert all(set(shows) <= set(NORMAL) for shows in FAULTS.values())


def test_a_chart_names_who_waits_and_the_first_call_that_differs(ward):
    skips = str(ward.chart(1 + PATIENTS.index("a rank skips a collective")))
    assert "ranks 0, 1, 3 waiting in all_gather\n" in skips and "  rank 2 done\n" in skips
    assert "rank 2 makes 23 calls, most have begun 24; the last is gather head" in skips
    order = str(ward.chart(1 + PATIENTS.index("another order on one rank")))
    assert "rank 1 calls reduce block 0 where most call reduce block 1, in place 2" in order


@pytest.mark.parametrize("number", [0, 13, "3"])
def test_a_patient_that_does_not_exist_is_refused_in_a_sentence(ward, number):
    with pytest.raises(ValueError, match="choose one of 1 to 12"):
        ward.chart(number)


def test_patients_need_four_ranks():
    with World(2) as world, pytest.raises(ValueError, match=r"give a World\(4\)"):
        Ward(world)
