"""The checks of lesson 03: stub, solution, and near misses with their words."""

import pytest
import torch
from test_checks_04 import expect, stub


@pytest.mark.parametrize("number", ["03.1", "03.2", "03.5", "03.3", "03.4", "03.6"])
@pytest.mark.parametrize("answer", [stub, None, ...])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    if number == "03.4" and answer is stub:
        expect(number, (keep, stub), 0, "not attempted")
        answer = (stub, stub)
    expect(number, answer, 0, "not attempted")


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        ("03.1", "7/8", [(1 / 8, "that is needed"), (0.75, "here are 8"), (7, "which share"),
                         (8, "could go"), (87.5, "in percent"), (0.5, "two ranks"),
                         (1, "One copy must stay"), (0.88, "rounded too coarsely")]),
        ("03.5", "840 GB", [("280 GB", "master copy alone"), ("1120 GB", "all model states"),
                            ("560 GB", "two moments"), ("140 GB", "working parameters"),
                            (12, "for one parameter"), ("13.125 GB", "on 64 ranks")]),
    ],
)  # fmt: skip
def test_numbers_and_their_near_misses(number, right, wrong):
    expect(number, lambda: right, 1, "passed")
    for answer, words in wrong:
        expect(number, lambda answer=answer: answer, 0, words)


def sizes(ranks):
    return [size for pieces in ranks for _, size in pieces.values()]


def keyed(key, add=lambda size: size):
    def count(ranks):
        seen, total = set(), 0
        for pieces in ranks:
            for name, (bits, size) in pieces.items():
                total += add(size) if key(name, bits) in seen else 0
                seen.add(key(name, bits))
        return total

    return count


def with_the_original(ranks):
    every = [(n, d, s) for pieces in ranks for n, (d, s) in pieces.items()]
    return sum(s for n, d, s in every if sum(e[:2] == (n, d) for e in every) > 1)


def against_rank_0(ranks):
    return sum(s for p in ranks[1:] for n, (d, s) in p.items() if ranks[0].get(n, ("",))[0] == d)


def once_for_each_earlier(ranks):
    pairs = [(p, q) for i, p in enumerate(ranks) for q in ranks[:i]]
    return sum(p[name][1] for p, q in pairs for name in p if p[name] == q.get(name))


def test_03_2_passes():
    expect("03.2", keyed(lambda n, d: (n, d)), 3, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_the_original, "is the original"),
        (keyed(lambda n, d: d), "another name is no copy"),
        (keyed(lambda n, d: n), "only if its bits"),
        (keyed(lambda n, d: (n, d), lambda size: 1), "add up bytes"),
        (lambda ranks: sum(sizes(ranks)) - sum(sizes(ranks[:1])), "digest"),
        (lambda ranks: sum(sizes(ranks)) - sum(sizes([ranks[0]])), "took for granted"),
        (lambda ranks: sum(sizes(ranks)) - sum(sizes(ranks)) // len(ranks), "(N-1)/N of all"),
        (against_rank_0, "ranks 1 and 2"),
        (once_for_each_earlier, "once for each earlier rank"),
        (lambda ranks: print(end=""), "print shows a value"),
        (lambda ranks: sum(sizes(ranks)) - keyed(lambda n, d: (n, d))(ranks), "what is needed"),
        (lambda ranks: sum(sizes(ranks)), "copies or not"),
        (lambda ranks: 180, "name and the digest"),
        (lambda ranks: ranks[9], "IndexError"),
        (180, "you return 180"),
    ],
)
def test_03_2_near_misses_are_named(answer, words):
    expect("03.2", answer, 0, words)


def owner(numel, world_size, index):
    return index // -(-numel // world_size) if index < numel else None


def balanced(numel, world_size, index):
    if index >= numel:
        return None
    parts = torch.tensor_split(torch.arange(numel), world_size)
    return next(rank for rank, part in enumerate(parts) if index in part)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n, w, i: i // -(-n // w), "This element is padding"),
        (lambda n, w, i: i // (n // w), "rounded the length down"),
        (lambda n, w, i: min(i // max(1, n // w), w - 1) if i < n else None, "left over"),
        (lambda n, w, i: i % w, "like cards"),
        (lambda n, w, i: i % w if i < n else None, "like cards"),
        (lambda n, w, i: min(i // (n // w), w - 1) if i < n else None, "left over"),
        (balanced, "differ in length"),
        (lambda n, w, i: i * w // n if i < n else None, "differ in length"),
        (lambda n, w, i: None, "in rank order"),
        (lambda n, w, i: i // (n // w + 1) if i < n else None, "too long"),
        (lambda n, w, i: owner(n, w, i) + 1 if i < n else None, "count from 0"),
        (lambda n, w, i: i / -(-n // w) // 1 if i < n else None, "Return a rank, an int"),
        (lambda n, w, i: 0, "in rank order"),
        (lambda n, w, i: n.owner, "AttributeError"),
        (0, "Give the function itself"),
    ],
)
def test_03_3_near_misses_are_named(answer, words):
    expect("03.3", owner, 2, "passed")
    expect("03.3", answer, 0, words)


def padded(state, world_size):
    length = -(-len(state) // world_size)
    whole = torch.zeros(length * world_size)
    whole[: len(state)] = state
    return whole, length


def keep(state, world_size, rank):
    whole, length = padded(state, world_size)
    return whole[rank * length : (rank + 1) * length].clone()


def keep_a_view(state, world_size, rank):
    whole, length = padded(state, world_size)
    return whole[rank * length : (rank + 1) * length]


def keep_without_padding(state, world_size, rank):
    length = -(-len(state) // world_size)
    return state[rank * length : (rank + 1) * length].clone()


def keep_rounded_down(state, world_size, rank):
    length = len(state) // world_size
    return state[rank * length : (rank + 1) * length].clone()


def restore_padded(shard, numel, comm):
    full = torch.empty(len(shard) * comm.world_size)
    comm.all_gather(full, shard)
    return full


def restore(shard, numel, comm):
    return restore_padded(shard, numel, comm)[:numel]


def restore_by_sum(shard, numel, comm):
    full = torch.zeros(len(shard) * comm.world_size)
    full[comm.rank * len(shard) : (comm.rank + 1) * len(shard)] = shard
    comm.all_reduce(full)
    return full[:numel]


def restore_reversed(shard, numel, comm):
    return restore_padded(shard, numel, comm).view(comm.world_size, -1).flip(0).flatten()[:numel]


def keep_and_remember(state, world_size, rank):
    import zerolab

    vars(zerolab).setdefault("remembered", {})[len(state)] = state.clone()
    return keep(state, world_size, rank)


def restore_from_memory(shard, numel, comm):
    import zerolab

    return zerolab.remembered[numel]


def on_rank_0(shard, numel, comm):
    state = restore(shard, numel, comm)
    return state if comm.rank == 0 else None


def test_03_4_passes():
    expect("03.4", (keep, restore), 4, "passed")


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        ((keep_a_view, restore), 2, "A slice is a view"),
        ((keep_without_padding, restore), 0, "padded with zeros"),
        ((keep_rounded_down, restore), 0, "padded with zeros"),
        ((lambda state, n, rank: state, restore), 0, "own part alone"),
        ((lambda state, n, rank: keep(state, n, 0), restore), 0, "one after the other"),
        ((keep, restore_padded), 0, "Cut the padding off"),
        ((keep, lambda shard, numel, comm: shard), 0, "Gather every shard"),
        ((keep, restore_by_sum), 2, "One all-gather is enough"),
        ((keep, restore_reversed), 0, "in its own place"),
        ((keep_and_remember, restore_from_memory), 0, "must ask the others"),
        ((keep, on_rank_0), 0, "restore returned nothing"),
        ((lambda *_: None, restore), 0, "keep returned nothing"),
        ((keep, lambda shard, numel, comm: comm.gather(shard)), 0, "AttributeError"),
        (keep, 0, "Two functions"),
    ],
)
def test_03_4_near_misses_are_named(answer, points, words):
    expect("03.4", answer, points, words)


TRAVEL = {"parameters": "all-gather", "gradients": "reduce-scatter", "optimizer states": "nothing"}


@pytest.mark.parametrize(
    ("change", "points", "words"),
    [
        ({}, 3, "passed"),
        ({"gradients": "Reduce_Scatter", "optimizer states": "none"}, 3, "passed"),
        ({"optimizer states": "all-gather"}, 2, "the lecture's sentence"),
        ({"optimizer states": "reduce-scatter"}, 2, "not summed"),
        ({"gradients": "all-reduce"}, 2, "stage 0"),
        ({"gradients": "reduce"}, 2, "to one rank"),
        ({"parameters": "all-gathers"}, 3, "passed"),
        ({"parameters": "gather"}, 2, "every rank needs them"),
        ({"gradients": "all-gather"}, 2, "by its owner"),
        ({"gradients": "nothing"}, 2, "must be summed"),
        ({"parameters": "nothing"}, 2, "must gather them"),
        ({"parameters": "reduce-scatter"}, 2, "they are collected"),
        ({"parameters": "broadcast"}, 2, "needed whole"),
        ({"activations": "nothing"}, 0, "no question"),
    ],
)
def test_03_6_and_its_near_misses(change, points, words):
    expect("03.6", lambda: TRAVEL | change, points, words)
