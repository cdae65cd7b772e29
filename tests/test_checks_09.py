"""The checks of lesson 09: stub, solution, and near misses with their words."""

from itertools import combinations

import pytest
import torch
from test_checks_04 import expect, stub

from zerolab.practice.tiers import down, put, up
from zerolab.theory.timeline import Task

NUMBERS = ["09.1", "09.2", "09.3", "09.4", "09.5", "09.6"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("answer", [stub, None])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


@pytest.mark.parametrize(
    ("number", "points", "right", "wrong"),
    [
        ("09.1", 1, "2.5 bytes per parameter",
                         [(5.5, "everything on the device"), (2, "parameters alone"),
                          (4, "whole gradients"), (1, "stage 3"), (5, "12/4"), (3, "two ranks"),
                          (14.5, "altogether"), (10, "all four ranks"),
                          (3.5, "all that is sharded"), (0.5, "shard of the sums alone")]),
        ("09.4", 2, 51_400, [(6425, "eight compute"), (154_200, "forward alone"),
                             (77_100, "backward alone"), (38_550, "nothing is recomputed"),
                             (295_200, "six times slower"), (20_000, "Adam on a GPU"),
                             (514_000, "10e9 parameters"), (106_912, "a peak"),
                             (514e12, "cancels"), (7, "with its units")]),
    ],
)  # fmt: skip
def test_numbers_and_their_near_misses(number, points, right, wrong):
    expect(number, lambda: right, points, "passed")
    for answer, words in wrong:
        expect(number, answer, 0, words)


def ways_of(sizes, most=None):
    for k in range(1, (most or len(sizes)) + 1):
        for way in combinations(sizes, k):
            yield set(way)


def crossing(edges, way):
    return sum(weight for u, v, weight in edges if (u in way) != (v in way))


def down_and_up(edges, way):
    down = sum(weight for u, v, weight in edges if u not in way and v in way)
    return down, crossing(edges, way) - down


def left(sizes, way):
    return sum(size for node, size in sizes.items() if node not in way)


def best_cut(edges, sizes):
    return min(ways_of(sizes), key=lambda way: (crossing(edges, way), left(sizes, way)))


def by_grown_flow(edges, sizes):
    """Another way: for each node that must move, grow the set as long as that gains."""
    found = []
    for first in sizes:
        way, gains = {first}, True
        while gains:
            rest = [n for n in sizes if n not in way]
            more = [way | set(c) for k in range(1, len(rest) + 1) for c in combinations(rest, k)]
            better = min([way, *more], key=lambda w: (crossing(edges, w), left(sizes, w)))
            gains, way = better != way, better
        found.append(way)
    return frozenset(min(found, key=lambda w: (crossing(edges, w), left(sizes, w))))


def uses_its_inputs_up(edges, sizes):
    best = best_cut(edges, sizes)
    while edges:
        edges.pop()
    sizes.clear()
    return best


def test_09_2_passes():
    expect("09.2", uses_its_inputs_up, 3, "passed")
    expect("09.2", best_cut, 3, "passed")
    expect("09.2", by_grown_flow, 3, "passed")
    expect("09.2", lambda edges, sizes: sorted(best_cut(edges, sizes)), 3, "passed")
    expect("09.2", lambda *given: dict.fromkeys(best_cut(*given)).keys(), 3, "passed")


def least(measure):
    return lambda edges, sizes: min(ways_of(sizes), key=lambda way: measure(edges, sizes, way))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda edges, sizes: set(), "saves nothing"),
        (lambda edges, sizes: set(sizes), "moved all"),
        (least(lambda e, s, w: (left(s, w), crossing(e, w))), "moved all"),
        (lambda edges, sizes: set(sizes) - best_cut(edges, sizes), "That is what stays"),
        (
            least(lambda e, s, w: (sum(x for u, v, x in e if u in w and v in w), left(s, w))),
            "those do not cross",
        ),
        (least(lambda e, s, w: crossing(e, w)), "between equal cuts"),
        (least(lambda e, s, w: (crossing(e, w), -left(s, w))), "between equal cuts"),
        (
            least(lambda e, s, w: (sum(x for u, v, x in e if u not in w and v in w), left(s, w))),
            "goes down alone",
        ),
        (
            least(lambda e, s, w: (sum(x for u, v, x in e if u in w and v not in w), left(s, w))),
            "comes up alone",
        ),
        (
            least(lambda e, s, w: (sum(x for u, v, x in e if u in w or v in w), left(s, w))),
            "what lies between them",
        ),
        (
            least(lambda e, s, w: (len([1 for u, v, _ in e if (u in w) != (v in w)]), left(s, w))),
            "their bytes are the third",
        ),
        (
            lambda e, s: min(ways_of(s, 1), key=lambda w: (crossing(e, w), left(s, w))),
            "one node at a time",
        ),
        (least(lambda e, s, w: (max(down_and_up(e, w)), left(s, w))), "the larger of the two"),
        (least(lambda e, s, w: crossing(e, w) + left(s, w)), "first the least that crosses"),
        (
            lambda e, s: min(ways_of(s, len(s) - 1), key=lambda w: (crossing(e, w), left(s, w))),
            "up to len(sizes)",
        ),
        (lambda e, s: (best_cut(e, s), 4), "you return {"),
        (lambda e, s: [["states"]], "you return ['states']"),
        (lambda e, s: {"grad16", "states", "update", "float2half"}, "Is a graph written down"),
        (least(lambda e, s, w: (-crossing(e, w), left(s, w))), "most that can cross"),
        (lambda edges, sizes: {"forward-backward"}, "update, float2half may move"),
        (lambda edges, sizes: 4, "a int"),
        (lambda edges, sizes: {"grad16", "states", "update", "float2half"} & set(sizes), "edges"),
        (lambda edges, sizes: edges[0].weight, "AttributeError"),
        (4, "Give the function itself"),
    ],
)
def test_09_2_near_misses_are_named(answer, words):
    expect("09.2", answer, 0, words)


def bring_up(unit, below, comm):
    unit.param_shard.copy_(up(below.master.bfloat16()))
    comm.all_gather(unit.full_params, unit.param_shard)


def bring_down(unit):
    grads = down(unit.grad_shard)
    unit.grad_shard = None
    return grads


def solution(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)
    bring_up(unit, below, comm)


def without_up(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)
    unit.param_shard.copy_(below.master.to(torch.bfloat16))
    comm.all_gather(unit.full_params, unit.param_shard)


def masters_up(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)
    unit.param_shard.copy_(up(below.master).bfloat16())
    comm.all_gather(unit.full_params, unit.param_shard)


def widens_above(unit, below, comm):
    below.update(down(unit.grad_shard.float()), 1 / comm.world_size)
    unit.grad_shard = None
    bring_up(unit, below, comm)


def whole_gradients_down(unit, below, comm):
    full = unit.grad_shard.new_empty(unit.padded)
    comm.all_gather(full, unit.grad_shard)
    unit.grad_shard = None
    length = unit.padded // comm.world_size
    own = down(full)[comm.rank * length : (comm.rank + 1) * length]
    below.update(own, 1 / comm.world_size)
    bring_up(unit, below, comm)


def gathers_below(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)
    shard = below.master.bfloat16()
    full = shard.new_empty(unit.padded)
    comm.all_gather(full, shard)
    unit.full_params.copy_(up(full))


def updates_above(unit, below, comm):
    states = ("master", "momentum", "variance")
    kept = {name: getattr(below, name) for name in states}
    for name in states:
        setattr(below, name, up(kept[name]))
    below.update(unit.grad_shard, 1 / comm.world_size)
    unit.grad_shard = None
    unit.param_shard.copy_(below.master.bfloat16())
    for name in states:
        kept[name].copy_(getattr(below, name))
        setattr(below, name, kept[name])
    comm.all_gather(unit.full_params, unit.param_shard)


def states_up_too(unit, below, comm):
    solution(unit, below, comm)
    for state in (below.master, below.momentum, below.variance):
        up(state)


def keeps_states_above(unit, below, comm):
    solution(unit, below, comm)
    unit.extra = torch.zeros(unit.param_shard.numel())


def forgets_n(unit, below, comm):
    below.update(bring_down(unit), 1)
    bring_up(unit, below, comm)


def divides_twice(unit, below, comm):
    below.update(bring_down(unit) / comm.world_size, 1 / comm.world_size)
    bring_up(unit, below, comm)


def four_written_out(unit, below, comm):
    below.update(bring_down(unit), 1 / 4)
    bring_up(unit, below, comm)


def forgets_up(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)


def forgets_gather(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)
    unit.param_shard.copy_(up(below.master.bfloat16()))


def forgets_update(unit, below, comm):
    bring_down(unit)
    bring_up(unit, below, comm)


def keeps_gradients(unit, below, comm):
    below.update(down(unit.grad_shard), 1 / comm.world_size)
    bring_up(unit, below, comm)


def marks(unit, below, comm):
    grads = put(unit.grad_shard, "cpu")
    unit.grad_shard = None
    below.update(grads, 1 / comm.world_size)
    bring_up(unit, below, comm)


def marks_what_goes_up(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)
    unit.param_shard.copy_(put(below.master.bfloat16(), "device"))
    comm.all_gather(unit.full_params, unit.param_shard)


def updates_across(unit, below, comm):
    below.update(unit.grad_shard, 1 / comm.world_size)


def wide_copy(unit, below, comm):
    below.update(bring_down(unit), 1 / comm.world_size)
    unit.param_shard.copy_(below.master)


def sums_again(unit, below, comm):
    solution(unit, below, comm)
    comm.all_gather(unit.full_params, unit.param_shard)


def one_rank_skips(unit, below, comm):
    if comm.rank:
        solution(unit, below, comm)
    else:
        forgets_gather(unit, below, comm)


def updates_twice(unit, below, comm):
    grads = bring_down(unit)
    below.update(grads, 1 / comm.world_size)
    below.update(grads, 1 / comm.world_size)
    bring_up(unit, below, comm)


def rounds_the_mean_of_three(unit, below, comm):
    grads = down(unit.grad_shard / comm.world_size)
    unit.grad_shard = None
    below.update(grads, 1.0)
    bring_up(unit, below, comm)


def rounds_the_mean(unit, below, comm):
    grads = down(unit.grad_shard / 3)
    unit.grad_shard = None
    below.update(grads, 3 / comm.world_size)
    bring_up(unit, below, comm)


def renames(unit, below, comm):
    below.update(down(unit.grad_shard), 1 / comm.world_size)
    unit.grad_shard = None
    unit.param_shard = up(below.master.bfloat16())
    comm.all_gather(unit.full_params, unit.param_shard)


def multiplies_by_n(unit, below, comm):
    below.update(down(unit.grad_shard), comm.world_size)
    unit.grad_shard = None


def test_09_3_passes():
    expect("09.3", solution, 5, "passed")
    expect("09.3", without_up, 5, "passed")


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (masters_up, 3, "fp32 master weights came up"),
        (widens_above, 3, "widened to fp32 before"),
        (whole_gradients_down, 3, "whole gradients came down"),
        (gathers_below, 3, "whole parameters came up"),
        (updates_above, 3, "up and down again"),
        (states_up_too, 3, "not needed on the device"),
        (keeps_states_above, 3, "came up is kept"),
        (renames, 3, "A new unit.param_shard"),
        (multiplies_by_n, 0, "N² times too large"),
        (sums_again, 3, "One all-gather"),
        (forgets_n, 0, "N times too large"),
        (divides_twice, 0, "divided by N twice"),
        (forgets_up, 1, "bring the new ones up"),
        (forgets_gather, 1, "all-gather what came up"),
        (forgets_update, 0, "still zero"),
        (keeps_gradients, 1, "unit.grad_shard to None"),
        (marks, 3, "moves nothing: down()"),
        (marks_what_goes_up, 3, "moves nothing: up()"),
        (updates_across, 0, "copy one across first"),
        (wide_copy, 0, "convert first"),
        (updates_twice, 0, "takes this rank's shard"),
        (rounds_the_mean, 0, "up to rounding"),
        (one_rank_skips, 0, "did not come back"),
        (lambda unit, below, comm: None, 0, "still zero"),
        (lambda unit, below, comm: below.states, 0, "AttributeError"),
        (4, 0, "Give the function itself"),
    ],
)
def test_09_3_near_misses_are_named(answer, points, words):
    expect("09.3", answer, points, words)


def test_09_3_what_is_exact_on_four_ranks_and_rounded_on_three_is_no_4_written_out():
    words = ("All is right on four ranks. On three", "division by 4 is exact", "up to rounding")
    verdict = expect("09.3", rounds_the_mean_of_three, 0, *words)
    assert "written out" not in str(verdict)
    expect("09.3", four_written_out, 0, "Is a 4 written out somewhere?")


def two_rooms(units, read_s, update_s, write_s, ahead=2):
    tasks = [Task(f"read {u}", "disk", read_s) for u in range(min(ahead, units))]
    for u in range(units):
        tasks.append(Task(f"update {u}", "cpu optimizer", update_s, (f"read {u}",)))
        tasks.append(Task(f"write {u}", "disk", write_s, (f"update {u}",)))
        if u + ahead < units:
            tasks.append(Task(f"read {u + ahead}", "disk", read_s, (f"write {u}",)))
    return tasks


def test_09_5_passes():
    expect("09.5", two_rooms, 3, "passed")
    expect("09.5", lambda *given: tuple(two_rooms(*given)), 3, "passed")


def changed(change):
    return lambda *given: [change(task) for task in two_rooms(*given)]


def unit_after_unit(units, read_s, update_s, write_s):
    return [
        task
        for u in range(units)
        for task in (
            Task(f"read {u}", "disk", read_s),
            Task(f"update {u}", "cpu optimizer", update_s, (f"read {u}",)),
            Task(f"write {u}", "disk", write_s, (f"update {u}",)),
        )
    ]


def all_reads_first(units, read_s, update_s, write_s):
    tasks = unit_after_unit(units, read_s, update_s, write_s)
    return sorted(tasks, key=lambda task: not task.name.startswith("read"))


def without_room(task):
    return Task(task.name, task.stream, task.seconds, ()) if "read" in task.name else task


def three_rooms(*given):
    return two_rooms(*given, ahead=3)


def waits_twice(units, read_s, update_s, write_s):
    tasks = []
    for task in two_rooms(units, read_s, update_s, write_s):
        after = task.after
        number = int(task.name.split()[1])
        if task.name.startswith("update") and number:
            after = (*after, f"write {number - 1}")
        tasks.append(Task(task.name, task.stream, task.seconds, after))
    return tasks


def without_waiting(what):
    return changed(
        lambda task: Task(task.name, task.stream, task.seconds) if what in task.name else task
    )


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (unit_after_unit, 1, "listed after write 0"),
        (all_reads_first, 0, "room for two"),
        (three_rooms, 0, "room for two"),
        (waits_twice, 1, "need not"),
        (without_waiting("update"), 0, "what is not there yet"),
        (without_waiting("write"), 0, "the old states back"),
        (lambda *given: two_rooms(*given)[::-1], 0, "not in the list before it"),
        (lambda *given: two_rooms(*given)[:-1], 0, "is there 0 times"),
        (
            lambda n, r, u, w: [*two_rooms(n, r, u, w), Task(f"read {n}", "disk", r)],
            0,
            "the last one is unit 5",
        ),
        (lambda *given: [*two_rooms(*given), Task("flush", "disk", 1.0)], 0, "is there 1 times"),
        (changed(lambda task: Task(task.name, "disk", task.seconds, task.after)), 0, "on 'disk'"),
        (changed(lambda task: Task(task.name, task.stream, 0, task.after)), 0, "takes 0 s"),
        (lambda *given: 14.0, 0, "a list of Task"),
        (lambda *given: [("read 0", "disk", 2.0, ())], 0, "entry 0 of the list is a tuple"),
        (changed(lambda t: Task(t.name, t.stream, t.seconds, "".join(t.after))), 0, "A tuple of"),
        (changed(lambda t: Task(t.name, t.stream, t.seconds, t.after or None)), 0, "A tuple of"),
        (lambda *given: two_rooms(4, *given[1:]), 0, "is there 0 times"),
        (lambda *given: given[9], 0, "IndexError"),
    ],
)
def test_09_5_near_misses_are_named(answer, points, words):
    expect("09.5", answer, points, words)


RIGHT = {
    "optimizer states": "2100 GB",
    "with gradients": "2450 GB",
    "missing": "450 GB",
    "largest model": 2e12 / 14,
}


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("optimizer states", "1400 GB", "master weights move"),
        ("optimizer states", "700 GB", "one of the three"),
        ("optimizer states", "2800 GB", "all states"),
        ("optimizer states", "262.5 GB", "eighth"),
        ("optimizer states", "1955.8 GB", "GiB written as GB"),
        ("optimizer states", "16800 GB", "once, together"),
        ("with gradients", "2100 GB", "states alone"),
        ("with gradients", "2800 GB", "12 + 2"),
        ("with gradients", "2143.75 GB", "eight shards"),
        ("with gradients", "350 GB", "gradients alone"),
        ("missing", "100 GB", "Without the gradients"),
        ("missing", -450e9, "a positive number"),
        ("missing", "251 GB", "2 TiB"),
        ("missing", "800 GB", "14 bytes, not 16"),
        ("largest model", 2e12 / 12, "14 bytes, not 12"),
        ("largest model", 125e9, "stay on the GPUs"),
        ("largest model", 142.86, "in billions"),
        ("largest model", 2**41 / 14, "2^41"),
    ],
)
def test_09_6_judges_each_part_by_itself(part, value, words):
    expect("09.6", lambda: RIGHT, 4, "passed")
    expect("09.6", lambda: RIGHT | {part: value}, 3, words)


def test_09_6_wants_all_four_parts():
    expect("09.6", {"missing": "450 GB"}, 0, "exactly these entries")
