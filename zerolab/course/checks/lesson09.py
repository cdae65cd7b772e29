"""Lesson 09: what waits below the device. The step on ranks is judged in `lesson09_step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import combinations
from typing import Any

from zerolab.course.checks.core import Wrong, exercise, type_of
from zerolab.course.checks.functions import Misstep, expect_function
from zerolab.course.checks.lesson13 import expect_parts, number, size
from zerolab.course.checks.numbers import Slip, expect_bytes, expect_number
from zerolab.theory.offload import CPU_ADAM_S_PER_PARAM, EDGES, below
from zerolab.theory.timeline import Placed, Task, Timeline, run

Edges = Sequence[tuple[str, str, int]]
Sizes = dict[str, int]


@exercise(
    "09.1",
    "Predict stage 2 without its optimizer",
    points=1,
    hints=[
        "Write stage 2's sum down first: 2 + (2 + 12)/N. Which of the three terms leaves?",
        "The 12 go below; the shard of the sums is still on the device when backward is done.",
    ],
)
def predict(answer: Any) -> None:
    slips = [
        Slip(5.5, "5.5 is stage 2 with everything on the device: the 12 bytes are below now."),
        Slip(2, "2 is the parameters alone: backward has just left the shard of the sums there."),
        Slip(4, "4 has whole gradients, as stage 1 or a single rank has: at stage 2 a rank keeps "
             "its shard of them."),
        Slip(1, "1 divides the parameters, too: that is stage 3."),
        Slip(5, "5 leaves the optimizer's 12/4 on the device and takes the gradients down."),
        Slip(14.5, "The 12 bytes are below the device now: leave them out altogether."),
        Slip(3, "3 is right for two ranks; here there are four."),
        Slip(3.5, "3.5 is (2 + 12)/4, all that is sharded: the 12 are below, and whole parameters "
             "are on the device."),
        Slip(0.5, "0.5 is the shard of the sums alone: the parameters are there, too."),
        Slip(10, "10 is all four ranks together: give one rank's bytes."),
    ]  # fmt: skip
    right = sum(below(2, 4, 4).gpu.values()) / 4
    expect_bytes(answer, right, "Rank 0 of four, for each parameter", slips, per_parameter=True)


# Other graphs than ZeRO-Offload's, in which other mistakes show.
_GRAPHS: tuple[tuple[Edges, Sizes], ...] = (
    (EDGES, {"param16": 2, "grad16": 2, "states": 12, "update": 0, "float2half": 0}),
    # a chain: what goes down to b is heavy, what comes up from c is light
    (
        (("work", "a", 3), ("a", "b", 9), ("b", "c", 9), ("c", "work", 1)),
        {"a": 1, "b": 4, "c": 2},
    ),
    # moving "x" alone crosses least; "y" would free more, at a price
    (
        (("work", "x", 1), ("x", "work", 2), ("work", "y", 6), ("y", "work", 0), ("x", "y", 1)),
        {"x": 2, "y": 30},
    ),
    # "q" carries less in all than "p", and more in one direction
    ((("work", "p", 2), ("p", "work", 2), ("work", "q", 3), ("q", "work", 0)), {"p": 9, "q": 3}),
    # sums of 32 bits: gradients and states as before, and parameters of 32 bits go up
    (
        (("param", "work", 8), ("work", "grad", 4), ("grad", "update", 4), ("states", "update", 8),
         ("update", "states", 8), ("update", "param", 4)),
        {"param": 4, "grad": 4, "states": 8, "update": 0},
    ),
)  # fmt: skip


def _ways(sizes: Sizes) -> Iterable[set[str]]:
    return (set(way) for k in range(1, len(sizes) + 1) for way in combinations(sizes, k))


def _crossing(edges: Edges, way: set[str]) -> int:
    return sum(weight for u, v, weight in edges if (u in way) != (v in way))


def _stays(sizes: Sizes, way: set[str]) -> int:
    return sum(sizes[n] for n in sizes if n not in way)


def _where_to_cut(edges: Edges, sizes: Sizes) -> set[str]:
    return min(_ways(sizes), key=lambda way: (_crossing(edges, way), _stays(sizes, way)))


def _by(measure: Callable[[Edges, Sizes, set[str]], Any]) -> Callable[[Edges, Sizes], set[str]]:
    return lambda edges, sizes: min(_ways(sizes), key=lambda way: measure(edges, sizes, way))


_CUT_SLIPS: list[Misstep] = [
    (lambda e, s: set(), "To move nothing crosses nothing, and saves nothing: something must go."),
    (lambda e, s: set(s) - _where_to_cut(e, s), "That is what stays: return what moves."),
    (_by(lambda e, s, w: (sum(x for u, v, x in e if u in w and v in w), _stays(s, w))),
     "You counted edges with both ends below: those do not cross."),
    (lambda e, s: set(s), "You moved all that may move: what goes down must pay for its edges."),
    (_by(lambda e, s, w: _crossing(e, w)),
     ("As much crosses there, and more stays on the device: between equal cuts take the one that "
     "leaves least.")),
    (_by(lambda e, s, w: (sum(x for u, v, x in e if u not in w and v in w), _stays(s, w))),
     "You counted what goes down alone: what comes up crosses, too."),
    (_by(lambda e, s, w: (sum(x for u, v, x in e if u in w and v not in w), _stays(s, w))),
     "You counted what comes up alone: what goes down crosses, too."),
    (_by(lambda e, s, w: (sum(x for u, v, x in e if u in w or v in w), _stays(s, w))),
     ("You tried one node at a time, or counted edges with both ends below: several may move "
     "together, and what lies between them does not cross.")),
    (_by(lambda e, s, w: (max(sum(x for u, v, x in e if u not in w and v in w),
                              sum(x for u, v, x in e if u in w and v not in w)), _stays(s, w))),
     "You took the larger of the two directions: what crosses is both together."),
    (_by(lambda e, s, w: _crossing(e, w) + _stays(s, w)),
     "You added up what crosses and what stays: first the least that crosses, then what stays."),
    (lambda e, s: min((w for w in _ways(s) if len(w) < len(s)),
                      key=lambda w: (_crossing(e, w), _stays(s, w))),
     "All of them together may move, too: k goes up to len(sizes)."),
    (_by(lambda e, s, w: (len([x for u, v, x in e if (u in w) != (v in w)]), _stays(s, w))),
     "You counted edges: their bytes are the third entry."),
    (_by(lambda e, s, w: (-_crossing(e, w), _stays(s, w))), "That is the most that can cross."),
]  # fmt: skip


@exercise(
    "09.2",
    "Where to cut",
    points=3,
    hints=[
        "There are few nodes: try all sets. itertools.combinations(sizes, k) makes those of k.",
        "An edge (u, v, bytes) crosses where (u in way) != (v in way).",
        (
            "min(all_ways, key=lambda way: (crossing(way), left_on_device(way))): Python compares "
            "tuples entry by entry."
        ),
    ],
)
def where_to_cut(answer: Any) -> None:
    def tried(edges: Edges, sizes: Sizes) -> Any:
        got = answer(list(edges), dict(sizes))  # copies: an answer may use them up
        if not isinstance(got, Set | list | tuple):
            raise Wrong(f"You return {type_of(got)}.", "Return the set of the nodes that move.")
        if odd := [node for node in got if type(node) is not str or node not in sizes]:
            may = f"In this graph only {', '.join(sizes)} may move"
            raise Wrong(f"{may}; you return {odd[0]!r}, too.", "Is a graph written down? Return "
                        "a set of names that are in `sizes`.")  # fmt: skip
        return set(got)

    expect_function(
        tried if callable(answer) else answer, _where_to_cut, _GRAPHS, _CUT_SLIPS, _describe_graph,
        "Add up, for each set of nodes, the edges with one end inside.",
    )  # fmt: skip


def _describe_graph(edges: Edges, sizes: Sizes) -> str:
    if edges is EDGES:
        return "ZeRO-Offload's graph"
    return "the edges " + ", ".join(f"{u} to {v} {weight}" for u, v, weight in edges)


@exercise(
    "09.5",
    "Two units at a time",
    points=3,
    hints=[
        (
            "Each stream works off its tasks in the order in which you list them. Whose read must "
            "stand before the first write?"
        ),
        "Two rooms: read 0 and read 1 first. Then for each unit u: update u, write u, read u + 2.",
        (
            "after: update u needs read u; write u needs update u; read u + 2 needs write u, for "
            "it goes into the room that write u empties."
        ),
    ],
)
def two_rooms(answer: Any) -> None:
    for units, read_s, update_s, write_s in ((6, 2.0, 4.0, 2.0), (1, 1.0, 1.0, 1.0),
                                             (5, 3.0, 2.0, 1.0), (8, 1.0, 5.0, 2.0)):  # fmt: skip
        where = f"{units} unit{'s' * (units > 1)}, read {read_s:g} s, update {update_s:g} s, write "
        _judge_order(answer, units, read_s, update_s, write_s, f"{where}{write_s:g} s")


def _judge_order(
    answer: Any, units: int, read_s: float, update_s: float, write_s: float, where: str
) -> None:
    tasks = answer(units, read_s, update_s, write_s)
    if not isinstance(tasks, list | tuple):
        raise Wrong(f"{where}: this is {type_of(tasks)}.", "Return a list of Task(...).")
    for place, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise Wrong(f"{where}: entry {place} of the list is {type_of(task)}.",
                        "Each entry is a Task(name, stream, seconds, after).")  # fmt: skip
        if not isinstance(task.after, list | tuple):
            raise Wrong(f"{where}: {task.name} has after={task.after!r}.",
                        'A tuple of names, even of one: ("read 0",), or () for none.')  # fmt: skip
    costs = {"read": ("disk", read_s), "update": ("cpu optimizer", update_s),
             "write": ("disk", write_s)}  # fmt: skip
    wanted = {f"{what} {u}": cost for what, cost in costs.items() for u in range(units)}
    if sorted(t.name for t in tasks) != sorted(wanted):
        names = [t.name for t in tasks]
        first = next((n for n in (*wanted, *names) if names.count(n) != (n in wanted)), "")
        raise Wrong(
            f"{where}: {first!r} is there {names.count(first)} times.",
            'Each unit has one "read 0", one "update 0" and one "write 0", with its number'
            + ("." if first in wanted else f"; the last one is unit {units - 1}."),
        )
    if task := next((t for t in tasks if (t.stream, t.seconds) != wanted[t.name]), None):
        raise Wrong(
            f"{where}: {task.name} takes {task.seconds:g} s on {task.stream!r}.",
            "Reads and writes take their seconds on 'disk', updates on 'cpu optimizer'.",
        )
    try:
        made = run(tasks)
    except KeyError as error:
        raise Wrong(
            f"{where}: a task comes after {error}, which is not in the list before it.",
            "List what a task needs before the task itself.",
        ) from None
    _right_order(made, units, where)
    best = run(_two_rooms(units, read_s, update_s, write_s)).total_s
    if made.total_s > best * 1.001:
        raise Wrong(
            f"{where}: yours takes {made.total_s:g} s, and {best:g} s are possible.",
            _why_slow(tasks, made, units, read_s, update_s, write_s),
            points=1,
        )


def _right_order(made: Timeline, units: int, where: str) -> None:
    at: dict[str, Placed] = {p.task.name: p for p in made.placed}
    for u in range(units):
        if at[f"update {u}"].start_s < at[f"read {u}"].end_s:
            raise Wrong(
                f"{where}: update {u} begins before read {u} has ended.",
                "It would update what is not there yet: after=(f'read {u}',).",
            )
        if at[f"write {u}"].start_s < at[f"update {u}"].end_s:
            raise Wrong(
                f"{where}: write {u} begins before update {u} has ended.",
                "It would write the old states back: after=(f'update {u}',).",
            )
        inside = sum(
            at[f"read {v}"].start_s <= at[f"read {u}"].start_s < at[f"write {v}"].end_s
            for v in range(units)
        )
        if inside > 2:
            raise Wrong(
                f"{where}: when read {u} begins, {inside} units are in memory.",
                "There is room for two: read u + 2 must come after write u, which empties its "
                "room. Whoever reads all at once needs memory for all states.",
            )


def _two_rooms(units: int, read_s: float, update_s: float, write_s: float) -> list[Task]:
    tasks = [Task(f"read {u}", "disk", read_s) for u in range(min(2, units))]
    for u in range(units):
        tasks.append(Task(f"update {u}", "cpu optimizer", update_s, (f"read {u}",)))
        tasks.append(Task(f"write {u}", "disk", write_s, (f"update {u}",)))
        if u + 2 < units:
            tasks.append(Task(f"read {u + 2}", "disk", read_s, (f"write {u}",)))
    return tasks


def _why_slow(
    tasks: Sequence[Task], made: Timeline, units: int, read_s: float, update_s: float,
    write_s: float,
) -> str:  # fmt: skip
    if math.isclose(made.total_s, units * (read_s + update_s + write_s)):
        order = [t.name for t in tasks if t.stream == "disk"]
        if order.index("write 0") < order.index("read 1"):
            return (
                "Nothing overlaps. A stream keeps its order: read 1 is listed after write 0, which "
                "waits for update 0. List it before, while there is a room for it."
            )
        return "Nothing overlaps: each task waits for the one before. Which of the waits is needed?"
    return (
        "Something waits that need not: read 1 for a room that is empty, or read u + 2 for more "
        "than write u."
    )


@exercise(
    "09.4",
    "Tokens that hide the CPU's step",
    points=2,
    hints=[
        "Write both times for Ψ parameters and t tokens, and set them equal. What cancels?",
        "0.257e-9 · Ψ seconds against 6 · Ψ · t / (8 · 150e12) seconds.",
    ],
)
def tokens(answer: Any) -> None:
    node = 8 * 150e12
    right = CPU_ADAM_S_PER_PARAM * node / 6
    slips = [
        Slip(right / 8, "That is one GPU's share, or one GPU alone: all eight compute."),
        Slip(right * 3, "2 FLOPs for a token is forward alone; backward takes 4 more."),
        Slip(right * 1.5, "4 FLOPs is backward alone; forward takes 2 more."),
        Slip(right * 0.75, "8 FLOPs compute the forward pass twice: nothing is recomputed here."),
        Slip(14.76e-10 * node / 6, "That is torch's own Adam on the CPU, nearly six times slower."),
        Slip(1e-10 * node / 6, "That is Adam on a GPU: the question is for the CPU's."),
        Slip(right * 10, "2.57 s are 10e9 parameters: 0.257 s for each 1e9."),
        Slip(right * 10e9, "Ψ stands on both sides and cancels."),
        Slip(CPU_ADAM_S_PER_PARAM * 8 * 312e12 / 6, "312 TFLOP/s is a peak; a GPU here does 150."),
    ]
    expect_number(answer, right, "Tokens in a step of the node", slips)


HOST_BYTES = 2e12


@exercise(
    "09.6",
    "Does a host hold 175 billion?",
    points=4,
    hints=[
        "12 bytes of each parameter are optimizer states, 2 its gradient in 16 bits.",
        "missing = need - 2e12. The largest model: 14 bytes of each parameter fill the 2e12.",
    ],
)
def host_memory(answer: Any) -> None:
    psi = 175e9
    need = 14 * psi
    expect_parts(
        answer,
        {
            "optimizer states": (1.0, size(12 * psi, "Optimizer states of 175e9 parameters", [
                Slip(8 * psi, "8Ψ are the moments alone: the fp32 master weights move, too."),
                Slip(4 * psi, "4Ψ is one of the three: master weights and two moments, 12Ψ."),
                Slip(16 * psi, "16Ψ are all states; parameters and gradients are asked apart."),
                Slip(12 * psi / 8, "One GPU's eighth: all eight share the host's memory."),
                Slip(8 * 12 * psi, "At stage 3 the eight ranks hold them once, together."),
            ])),
            "with gradients": (1.0, size(need, "States and 16-bit gradients", [
                Slip(12 * psi, "That is the states alone: 2Ψ of gradients come down, too."),
                Slip(16 * psi, "That is 4 bytes for a gradient, or the parameters as well: here it "
                     "is 12 + 2."),
                Slip(need / 8, "One GPU's eighth: all eight share the host's memory."),
                Slip(2 * psi, "Those are the gradients alone: with them, the states come down."),
                Slip(12 * psi + 2 * psi / 8, "All eight shards of the gradients come down."),
            ])),
            "missing": (1.0, size(need - HOST_BYTES, "Missing in a host of 2e12 bytes", [
                Slip(12 * psi - HOST_BYTES, "Without the gradients 100 GB are missing; with them "
                     "more."),
                Slip(HOST_BYTES - need, "What is missing is need minus room, a positive number."),
                Slip(need - 2 * 2**40, "That is a host of 2 TiB; here it has 2 TB, 2e12 bytes."),
                Slip(12 * psi - 2 * 2**40, "A host of 2 TiB; here it has 2 TB, 2e12 bytes."),
                Slip(16 * psi - HOST_BYTES, "The parameters stay on the GPUs: 14 bytes, not 16."),
            ])),
            "largest model": (1.0, number(HOST_BYTES / 14, "Parameters that 2 TB can serve", [
                Slip(HOST_BYTES / 12, "The gradients need room as well: 14 bytes, not 12."),
                Slip(HOST_BYTES / 16, "The 2 bytes of the parameters stay on the GPUs: 14."),
                Slip(HOST_BYTES / 14 / 1e9, "That is in billions: give the number of parameters."),
                Slip(2 * 2**40 / 14, "2 TB are 2e12 bytes; 2^41 is 2 TiB."),
                Slip(8 * HOST_BYTES / 14, "The memory is the node's, not each GPU's."),
            ])),
        },
    )  # fmt: skip
