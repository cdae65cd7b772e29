"""Overlap: what it gains, and what it can never gain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.theory.timeline import (
    STREAMS,
    Costs,
    Task,
    derive_overlap_bound,
    run,
    step_tasks,
)

seconds = st.integers(0, 1000)
two_streams = st.builds(
    Costs, forward=seconds, backward=seconds, gather=seconds, reduce=seconds, final_gather=seconds,
    reduce_every=st.booleans(),
)  # fmt: skip
all_streams = st.builds(
    Costs, forward=seconds, backward=seconds, gather=seconds, reduce=seconds, final_gather=seconds,
    fetch=seconds, fetch_from=st.sampled_from(["host link", "disk"]), checkpoints=seconds,
    down=seconds, read=seconds, optimizer=seconds, write=seconds, up=seconds,
)  # fmt: skip
shapes = st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(1, 3))


def test_the_bound_is_derived():
    derivation = derive_overlap_bound()
    assert derivation.result == 2 and derivation.steps[-1].relation == "<="


def test_the_bound_is_reached_only_where_both_are_equal():
    for compute, network, gain in ((100, 100, 2), (100, 50, 1.5)):
        tasks = [Task("c", "compute", compute), Task("m", "network", network)]
        assert run(tasks, overlap=False).total_s / run(tasks).total_s == gain


@given(two_streams, shapes)
@settings(max_examples=150, deadline=None)
def test_two_streams_gain_at_most_a_factor_of_two(costs, shape):
    tasks = step_tasks(costs, *shape)
    serial, overlapped = run(tasks, overlap=False).total_s, run(tasks).total_s
    assert overlapped <= serial * 1.0000001 and serial <= 2.0000001 * overlapped


@given(all_streams, shapes)
@settings(max_examples=150, deadline=None)
def test_no_schedule_is_shorter_than_its_busiest_stream(costs, shape):
    tasks = step_tasks(costs, *shape)
    line, serial = run(tasks), run(tasks, overlap=False)
    assert line.total_s >= line.busy_s(line.bound) * 0.9999999
    assert serial.total_s == pytest.approx(sum(line.busy_s(stream) for stream in STREAMS))
    ends = {p.task.name: p.end_s for p in line.placed}
    assert len(ends) == len(tasks)
    for placed in line.placed:
        assert all(placed.start_s >= ends[name] for name in placed.task.after)


@given(all_streams, st.integers(1, 6), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_work_does_not_depend_on_prefetch(costs, units, micro_batches):
    for stream in STREAMS:
        busy = {round(run(step_tasks(costs, units, p, micro_batches)).busy_s(stream), 6)
                for p in (0, 1, 3)}  # fmt: skip
        assert len(busy) == 1


def test_prefetch_hides_gathers_and_zero_prefetch_hides_none():
    costs = Costs(forward=8, backward=16, gather=8)
    none, one = (run(step_tasks(costs, 8, prefetch)).total_s for prefetch in (0, 1))
    assert none == 40, "each gather waits for the unit before: 24 of compute, 16 of network"
    assert one == 25, "only the first gather is seen"


def test_at_most_the_prefetched_units_are_gathered_ahead():
    line = run(step_tasks(Costs(forward=8, backward=8, gather=1), 8, prefetch=1))
    start = {p.task.name: p.start_s for p in line.placed}
    assert start["gather 0.f2"] >= start["0.f1"], "unit 2 waits until unit 0 is done"


def test_gradients_are_reduced_after_every_backward_only_where_asked():
    for every, busy in ((True, 12), (False, 3)):
        line = run(step_tasks(Costs(reduce=3, reduce_every=every), 3, 1, micro_batches=4))
        assert line.busy_s("network") == pytest.approx(busy)


def test_the_optimizer_on_the_cpu_runs_once_a_step_after_the_last_backward():
    line = run(step_tasks(Costs(forward=1, backward=2, down=1, optimizer=5, up=1), 1, 1, 4))
    assert line.busy_s("cpu optimizer") == 5
    assert line.total_s == 4 * 3 + 1 + 5 + 1 and line.bound == "compute"
