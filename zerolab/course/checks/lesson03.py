"""Lesson 03: copies counted, claims about them refuted, and a state that many ranks own."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise, given_back, shown, type_of
from zerolab.course.checks.functions import ARITHMETIC, expect_function, same_plain, without
from zerolab.course.checks.numbers import Slip, expect_bytes, expect_number, read_number
from zerolab.course.checks.on_ranks import RANKS, apart, on_four_and_three, on_ranks
from zerolab.course.checks.quiz import Question, expect_answers
from zerolab.course.redundancy import Pieces, redundant_bytes
from zerolab.practice.comm import Comm
from zerolab.practice.meter import Meter
from zerolab.practice.sharding import padded_numel, shard_of

SIZES = (12, 10, 1001, 2)  # of states to cut: the last rank's part is full, short, or empty


@exercise(
    "03.1",
    "Predict the share of copies",
    points=1,
    hints=["Of eight equal copies, how many could go?", "Seven of eight."],
)
def predict(answer: Any) -> None:
    slips = [
        Slip(1 / 8, "That is the part that is needed: the copies are the rest."),
        Slip(3 / 4, "That is right for four ranks, or it is AdamW's part of a rank; here are 8."),
        Slip(7, "Seven copies are too many: which share of all bytes are they?"),
        Slip(8, "Eight are there: which share of all bytes could go?"),
        Slip(87.5, "That is right in percent: write it as 7 / 8."),
        Slip(1 / 2, "Half would be two ranks."),
        Slip(1, "One copy must stay: without it there is no model."),
    ]
    value = given_back(answer)
    if type(value) is str and value.rstrip().endswith("%"):
        value = read_number(value.rstrip("% ")) / 100
    expect_number(value, 7 / 8, "The share of copies on eight ranks", slips)


_CASES: list[tuple[str, list[Pieces]]] = [
    ("four ranks that hold the same two pieces", [{"master": ("a", 40), "params": ("b", 20)}] * 4),
    ("four ranks with shards of their own", [{"master": (x, 10)} for x in "abcd"]),
    ("equal parameters beside different shards",
     [{"params": ("p", 20), "master": (x, 10)} for x in "abcd"]),
    ("two moments that are still zero",
     [{"momentum": ("0", 8), "variance": ("0", 8)}, {"momentum": ("x", 8), "variance": ("y", 8)}]),
    ("ranks 1 and 2 alike, rank 0 not", [{"params": (x, 6)} for x in "abbc"]),
    ("ranks 0 and 2 alike, rank 1 not", [{"params": (x, 6)} for x in "abac"]),
    ("one rank", [{"params": ("a", 16)}]),
    ("no ranks", []),
]  # fmt: skip


def _total(ranks: list[Pieces]) -> int:
    return sum(size for pieces in ranks for _, size in pieces.values())


def _with_originals(ranks: list[Pieces]) -> int:
    times = Counter((n, d) for pieces in ranks for n, (d, _) in pieces.items())
    return sum(s for pieces in ranks for n, (d, s) in pieces.items() if times[n, d] > 1)


def _by(ranks: list[Pieces], key: Callable[[str, str], str]) -> int:
    """Bytes of pieces whose key was met before."""
    one_by_one = [{key(n, d): ("", s)} for pieces in ranks for n, (d, s) in pieces.items()]
    return redundant_bytes(one_by_one)


@exercise(
    "03.2",
    "Count the copies",
    points=3,
    hints=[
        "Walk through the ranks in order. What must you remember of the pieces you have met?",
        "A piece is a copy if a piece of the same name and the same digest was met before.",
        "seen = set(); for each piece: if (name, digest) in seen, add its bytes; then remember it.",
    ],
)
def redundant(answer: Any) -> None:
    answer = without(answer, "zerolab.course.redundancy:redundant_bytes")
    missteps: list[tuple[Callable[[list[Pieces]], Any], str]] = [
        (_with_originals,
         "One of them is the original: it is needed, and only the others are copies."),
        (lambda ranks: _by(ranks, lambda n, d: d),
         "Momentum and variance begin as zeros and will part: another name is no copy."),
        (lambda ranks: _by(ranks, lambda n, d: n),
         "A piece of the same name is a copy only if its bits are the same: compare digests."),
        (lambda ranks: redundant_bytes([{n: (d, 1) for n, (d, _) in p.items()} for p in ranks]),
         "You counted pieces: add up bytes."),
        (lambda ranks: _total(ranks) - _total([ranks[0]]),
         "You took for granted that all ranks hold what rank 0 holds: compare digests."),
        (lambda ranks: _total(ranks) - _total(ranks) // len(ranks),
         "(N-1)/N of all is right where everything is a copy: compare digests."),
        (lambda ranks: sum(s for p in ranks[1:] for n, (d, s) in p.items()
                           if ranks[0].get(n, ("", 0))[0] == d),
         "You compared with rank 0 alone: ranks 1 and 2 may have a piece in common."),
        (lambda ranks: sum(s for before, p in pairwise(ranks) for n, (d, s) in p.items()
                           if before.get(n, ("", 0))[0] == d),
         "You compared with the rank before alone: any earlier rank may hold the same."),
        (lambda ranks: sum(s for i, p in enumerate(ranks) for q in ranks[:i]
                           for n, (d, s) in p.items() if q.get(n, ("", 0))[0] == d),
         "You count a copy once for each earlier rank that holds it: once is right."),
        (lambda ranks: _total(ranks) - redundant_bytes(ranks),
         "That is what is needed: the copies are the rest."),
        (_total, "These are all bytes, copies or not."),
    ]  # fmt: skip
    expect_function(
        lambda what, ranks: (
            answer([dict(pieces) for pieces in ranks]) if callable(answer) else answer
        ),
        lambda what, ranks: redundant_bytes(ranks),
        _CASES,
        [(lambda what, ranks, w=wrong: w(ranks), words) for wrong, words in missteps],
        lambda what, ranks: what,
        "A copy has the name and the digest of a piece that an earlier rank holds.",
    )


@exercise(
    "03.3",
    "Who owns this element",
    points=2,
    hints=[
        "All shards are equally long. How long, if all elements must find a place?",
        "numel / world_size, rounded up: -(-numel // world_size).",
        "Rank 0 owns the first so many, rank 1 the next: index // length. Padding is nobody's.",
    ],
)
def who_owns(answer: Any) -> None:
    sizes = [(12, 4), (10, 4), (9, 4), (2, 4), (1001, 7)]
    cases = [(n, w, i) for n, w in sizes for i in range(padded_numel(n, w))]

    def right(numel: int, world_size: int, index: int) -> int | None:
        return index // -(-numel // world_size) if index < numel else None

    expect_function(
        without(answer, *ARITHMETIC),
        right,
        cases,
        [
            (lambda n, w, i: i // -(-n // w),
             "This element is padding: it is there to make shards equal, and nobody owns it."),
            (lambda n, w, i: -1 if i >= n else i // -(-n // w),
             "Nobody owns padding: say None, since -1 would be a rank counted from the end."),
            (lambda n, w, i: None if i > n else i // -(-n // w),
             "Places count from 0: place numel is padding already."),
            (lambda n, w, i: None if i >= n else i // (n // w),
             "You rounded the length down: then some elements find no rank. Round up."),
            (lambda n, w, i: i // (n // w),
             "You rounded the length down: then some elements find no rank. Round up."),
            (lambda n, w, i: min(i // max(1, n // w), w - 1) if i < n else None,
             "The last rank gets all that is left over, more than a shard: round the length up."),
            (lambda n, w, i: min(i // (n // w), w - 1) if i < n else None,
             "The last rank gets all that is left over, more than a shard: round the length up."),
            (lambda n, w, i: i % w if i < n else None,
             "You deal the elements out like cards: a shard is one piece, cut from the buffer."),
            (lambda n, w, i: i % w,
             "You deal the elements out like cards: a shard is one piece, cut from the buffer."),
            *((lambda n, w, i, cut=cut: cut(n, w, i) if i < n else None,
               ("Your shards differ in length by one: a collective moves equal parts, so all are "
               "rounded up and the end is padded."))
              for cut in (_balanced, lambda n, w, i: i * w // n)),
            (lambda n, w, i: i // (n // w + 1) if i < n else None,
             "n // N + 1 is too long where N divides n: round up, which adds nothing then."),
            (lambda n, w, i: i // -(-n // w) + 1 if i < n else None, "Ranks count from 0."),
        ],
        lambda n, w, i: f"element {i} of {n} on {w} ranks",
        "Shards are ceil(numel / world_size) long and lie in rank order.",
        same=_same_rank,
    )  # fmt: skip


def _same_rank(got: Any, wanted: int | None) -> bool:
    if got is not None and (type(got) is bool or not hasattr(type(got), "__index__")):
        raise Wrong(f"You returned {shown(got)}.", "Return a rank, an int, or None for padding.")
    return same_plain(got, wanted)


def _balanced(numel: int, world_size: int, index: int) -> int:
    each, more = divmod(numel, world_size)
    long = more * (each + 1)
    return index // (each + 1) if index < long else more + (index - long) // max(1, each)


@exercise(
    "03.4",
    "Cut a state up, and put it together again",
    points=4,
    hints=[
        "keep: pad with zeros to a multiple of world_size, cut out the rank's part, copy it.",
        "A slice of the padded buffer is a view; .clone() gives it memory of its own.",
        (
            "restore: make full = torch.empty(len(shard) * comm.world_size), fill it by "
            "comm.all_gather(full, shard), and return full[:numel]."
        ),
    ],
)
def cut_and_restore(answer: Any) -> None:
    if not (isinstance(answer, tuple | list) and len(answer) == 2 and all(map(callable, answer))):
        raise Wrong("Two functions are needed.", 'Call check("03.4", (keep, restore)).')
    keep, restore = answer
    seed = random.randrange(2**31)  # states that nobody can have prepared
    states = apart(_states, seed)
    on_four_and_three(lambda size: _judge_cut(keep, restore, seed, size, states[size]))


def _judge_cut(keep: Any, restore: Any, seed: int, size: int, states: States) -> None:
    seen = on_ranks(_keep_on_rank, keep, seed, size=size)
    kept = [
        Trial(where, got, right := shard_of(start, size, rank), held, right.nbytes)
        for _, where, rank, (got, held), start, _ in _in_order(seen, states)
    ]
    for t in kept:
        short = "All shards are equally long, the last ones padded with zeros: round up."
        long = "That is too long: a rank keeps its own part alone."
        other = "Shards lie one after the other, in rank order; zeros fill the end."
        _expect_tensor(t, "keep", "your shard has", short, long, other)
    seen = on_ranks(_restore_on_rank, restore, seed, size=size)
    for numel, where, _, (got, sent), start, changed in _in_order(seen, states):
        budget = (size - 1) * start.nbytes // size
        t = Trial(where, got, changed[:numel], sent, budget, start[:numel])
        short, long = "Gather every shard.", "Cut the padding off."
        other = "Each rank's shard belongs in its own place."
        _expect_tensor(t, "restore", "you put together", short, long, other)
        if t.cost > t.budget:
            raise Wrong(
                f"{t.where}: all is right, but it sends {t.cost} bytes; {t.budget} suffice.",
                "One all-gather is enough: an all-reduce of zero-filled buffers sends twice that.",
                points=2,
            )
    for t in kept:
        if t.cost > t.budget:
            raise Wrong(
                f"{t.where}: all is right, but keep leaves {t.cost} bytes alive; the shard has "
                f"{t.budget}.",
                "A slice is a view, and keeps the whole behind it alive: copy it, let the rest go.",
                points=2,
            )


@dataclass(frozen=True)
class Trial:
    """What a function returned on a rank, what is right, and its bytes: held by keep, sent by
    restore. `stale` is the state before the shards were changed."""

    where: str
    got: Any
    right: Tensor
    cost: int
    budget: int
    stale: Tensor | None = None


States = list[tuple[Tensor, Tensor]]  # of each size, padded: as `keep` gets it, and changed


def _in_order(by_rank: list[Any], states: States) -> Iterator[tuple[Any, ...]]:
    """Size by size, on rank after rank: what the rank showed, and the two states."""
    for place, (numel, both) in enumerate(zip(SIZES, states, strict=True)):
        for rank, seen in enumerate(by_rank):
            yield numel, f"{numel} elements, rank {rank}", rank, seen[place], *both


def _states(seed: int) -> dict[int, States]:
    """By number of ranks."""
    return {n: [(_state(numel, n, seed), _changed(numel, n, seed)) for numel in SIZES]
            for n in (RANKS, 3)}  # fmt: skip


def _state(numel: int, world_size: int, seed: int) -> Tensor:
    """A padded state: (padded numel,)."""
    draw = torch.Generator().manual_seed(seed + numel * world_size)
    return F.pad(torch.randn(numel, generator=draw), (0, -numel % world_size))


def _changed(numel: int, world_size: int, seed: int) -> Tensor:
    """The same when every rank has changed its shard, as an optimizer would."""
    state = _state(numel, world_size, seed)
    return state + torch.arange(1, world_size + 1).repeat_interleave(len(state) // world_size)


def _keep_on_rank(keep: Callable[[Tensor, int, int], Any], seed: int) -> list[tuple[Any, int]]:
    """What keep returned of each size, and the bytes that it holds."""
    comm, found = Comm(), []
    for numel in SIZES:
        given = [_state(numel, comm.world_size, seed)[:numel].clone()]
        with Meter() as meter:
            got = keep(given.pop(), comm.world_size, comm.rank)
            gc.collect()
            found.append((got, meter.held()["total"]))
    return found


def _restore_on_rank(
    restore: Callable[[Tensor, int, Comm], Any], seed: int
) -> list[tuple[Any, int]]:
    """What restore returned of each size, and the bytes that it sent: nobody else knows a shard."""
    comm, found = Comm(), []
    n, rank = comm.world_size, comm.rank
    for numel in SIZES:
        shard = shard_of(_changed(numel, n, seed), n, rank).clone()
        with Meter() as meter:
            got = restore(shard, numel, comm)
        sent = meter.sent_bytes()
        found.append((got, sent["total"] + sent["control"]))
    return found


def _expect_tensor(t: Trial, name: str, has: str, short: str, long: str, other: str) -> None:
    if type(t.got) is not Tensor:
        raise Wrong(f"{t.where}: {name} returned {type_of(t.got)}.", "Return a plain tensor.")
    have, right = t.got.numel(), t.right.numel()
    if t.got.shape != t.right.shape:
        raise Wrong(f"{t.where}: {has} {have} elements; right are {right}, in one dimension.",
                    short if have < right else long if have > right else "Flatten it.")  # fmt: skip
    if t.got.dtype != t.right.dtype:
        raise Wrong(f"{t.where}: {name} returned {t.got.dtype}.", "The state is torch.float32.")
    if not torch.equal(t.got, t.right):
        if t.stale is not None and torch.equal(t.got, t.stale):
            other = "That is the state before the shards were changed: restore must ask the others."
        raise Wrong(f"{t.where}: the elements are not the right ones.", other)


@exercise(
    "03.5",
    "Optimizer states of 70 billion parameters",
    points=1,
    hints=["Three pieces of 4 bytes.", "12 bytes for each of 70e9 parameters."],
)
def seventy_billion(answer: Any) -> None:
    psi = 70e9
    slips = [
        Slip(4 * psi, "4 bytes each: that is the fp32 master copy alone, or one moment. There are "
                      "three such pieces."),
        Slip(16 * psi, "That is all model states: leave out parameters and gradients."),
        Slip(8 * psi, "That is the two moments: the master weight belongs to K, too."),
        Slip(2 * psi, "That is the working parameters, or the gradients."),
        Slip(12, "12 is bytes for one parameter: there are 70e9 of them."),
        Slip(12 * psi / 64, "That is a shard on 64 ranks: here nothing is partitioned yet."),
    ]  # fmt: skip
    expect_bytes(answer, 12 * psi, "Optimizer states of 70e9 parameters", slips)


TRAVEL = "A parameter is needed whole by forward and backward, a gradient only summed by its owner."
QUESTIONS = (
    Question("parameters", ("all-gather", "all gather", "all_gather"), {
        "gather": "A gather collects them on one rank alone: here every rank needs them.",
        "reduce-scatter": "A reduce-scatter adds: parameters are not added, they are collected.",
        "all-reduce": "An all-reduce adds: adding parameters makes no sense here.",
        "nothing": "A rank with a shard of the weights cannot run a layer: it must gather them.",
    }, TRAVEL),
    Question("gradients", ("reduce-scatter", "reduce scatter", "reduce_scatter"), {
        "reduce": "A reduce brings all sums to one rank: each has an owner of its own.",
        "all-gather": "Nobody needs everybody's gradients: their sum is needed, by its owner.",
        "all-reduce": "That gives every rank every sum, and a rank uses only its shard: stage 0.",
        "nothing": "Every rank has gradients of its own batch: they must be summed.",
    }, TRAVEL),
    Question("optimizer states", ("nothing", "none", "no"), {
        "all-gather": "That is the lecture's sentence. A rank updates its own shard with its own "
                      "states, and nobody else asks for them.",
        "reduce-scatter": "Optimizer states are not summed: each has one owner, who alone uses it.",
        "all-reduce": "Optimizer states are neither summed nor shared: each has one owner.",
    }, "Who needs a state, besides the rank that updates this element?"),
)  # fmt: skip


@exercise(
    "03.6",
    "What travels at stage 3",
    points=3,
    hints=[
        "Look at the table: which kinds of state occur in it, and under which collective?",
        "One kind is gathered, one is reduce-scattered, one does not occur.",
    ],
)
def what_travels(answer: Any) -> None:
    expect_answers(answer, QUESTIONS)
