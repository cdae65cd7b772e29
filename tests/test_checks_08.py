"""The checks of lesson 08, run on real ranks: stub, solution, and near misses with their words."""

import os

import pytest
import torch
import torch.distributed as dist
from test_checks_04 import expect, stub

from zerolab import check
from zerolab.practice.comm import Comm
from zerolab.practice.ring import ring_all_gather, ring_reduce_scatter
from zerolab.theory import ring_time_s


@pytest.mark.parametrize("number", [f"08.{n}" for n in range(1, 10)])
@pytest.mark.parametrize("answer", [stub, None])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


def exchange(outgoing, incoming, right, left):
    sending = dist.isend(outgoing, right)
    dist.recv(incoming, left)
    sending.wait()


def gather(full, shard, rank, n, *, sends=0, receives=1, rounds=None, own=True, back=1, ranks=None):
    """A right ring all-gather, unless something else is asked for."""
    ranks = ranks or n
    chunks = full.view(n, -1)
    if own:
        chunks[rank] = shard
    for k in range(n - 1 if rounds is None else rounds):
        outgoing, incoming = chunks[(rank - k - sends) % n], chunks[(rank - k - receives) % n]
        exchange(outgoing, incoming, (rank + back) % ranks, (rank - back) % ranks)


def solution(full, shard, rank, world_size):
    gather(full, shard, rank, world_size)


def with_two_requests(full, shard, rank, world_size):
    full[rank * len(shard) : (rank + 1) * len(shard)] = shard
    parts, k = full.chunk(world_size), 0
    while k < world_size - 1:
        ops = [
            dist.P2POp(dist.irecv, parts[(rank - k - 1) % world_size], (rank - 1) % world_size),
            dist.P2POp(dist.isend, parts[(rank - k) % world_size], (rank + 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        k += 1


def overwrites_its_place(full, shard, rank, n):
    solution(full, shard, rank, n)
    full.view(n, -1)[rank] = -1


def never_passes_on(full, shard, rank, n):
    chunks = full.view(n, -1)
    chunks[rank] = shard
    for k in range(n - 1):
        exchange(shard, chunks[(rank - k - 1) % n], (rank + 1) % n, (rank - 1) % n)


def whole_buffers(full, shard, rank, n):
    full.view(n, -1)[rank] = shard
    for _ in range(n - 1):
        arrived = torch.empty_like(full)
        exchange(full, arrived, (rank + 1) % n, (rank - 1) % n)
        full.copy_(torch.maximum(full, arrived))


def to_everybody(full, shard, rank, n):
    chunks = full.view(n, -1)
    chunks[rank] = shard
    works = [dist.isend(shard, peer) for peer in range(n) if peer != rank]
    for peer in range(n):
        if peer != rank:
            dist.recv(chunks[peer], peer)
    for work in works:
        work.wait()


def blocks(full, shard, rank, n):
    full.view(n, -1)[rank] = shard
    dist.send(shard, (rank + 1) % n)
    dist.recv(full.view(n, -1)[rank - 1], (rank - 1) % n)


def waits_too_early(full, shard, rank, n):
    full.view(n, -1)[rank] = shard
    dist.isend(shard, (rank + 1) % n).wait()
    dist.recv(full.view(n, -1)[rank - 1], (rank - 1) % n)


def receives_first(full, shard, rank, n):
    full.view(n, -1)[rank] = shard
    dist.recv(full.view(n, -1)[rank - 1], (rank - 1) % n)


def one_buffer(full, shard, rank, n):
    """As if what comes had overwritten what is still to be sent: a round ahead in each place."""
    solution(full, shard, rank, n)
    full.copy_(full.view(n, -1).roll(1, 0).flatten())


def mutates(full, shard, rank, n):
    solution(full, shard, rank, n)
    shard.zero_()


def returns_it(full, shard, rank, n):
    own = full.clone()
    solution(own, shard, rank, n)
    return own


def wrong_dtype(full, shard, rank, n):
    exchange(shard, torch.empty(len(shard)), (rank + 1) % n, (rank - 1) % n)


def wrong_length(full, shard, rank, n):
    exchange(shard[:2], full[:2], (rank + 1) % n, (rank - 1) % n)


def scales(full, shard, rank, n):
    solution(full, shard, rank, n)
    full *= 2


def one_rank_skips(full, shard, rank, n):
    if rank:
        solution(full, shard, rank, n)


def of_the_whole_group(full, shard, rank, n):
    gather(full, shard, rank, n, ranks=dist.get_world_size())


def four_rounds_written_down(full, shard, rank, n):
    gather(full, shard, rank, n, rounds=3)


def length_written_down(full, shard, rank, n):
    def chunk(k):
        return full[3 * (k % n) : 3 * (k % n) + 3]

    chunk(rank).copy_(shard)
    for k in range(n - 1):
        exchange(chunk(rank - k), chunk(rank - k - 1), (rank + 1) % n, (rank - 1) % n)


def lengthens(full, shard, rank, n):
    full.resize_(20)


def ends_its_process(full, shard, rank, n):
    os._exit(0)


def natively(full, shard, rank, n):
    dist.all_gather_single(full, shard)


def with_comm(full, shard, rank, n):
    Comm().all_gather(full, shard)


def through_files_in(place):
    def through_a_file(full, shard, rank, n):
        import time

        folder = place / f"{n}-{dist.get_world_size()}"
        folder.mkdir(exist_ok=True)
        file = folder / f"{rank}.part"
        torch.save(shard, file)
        file.rename(folder / f"{rank}.pt")
        while len(list(folder.glob("*.pt"))) < n:
            time.sleep(0.01)
        full.copy_(torch.cat([torch.load(folder / f"{peer}.pt") for peer in range(n)]))

    return through_a_file


@pytest.mark.parametrize("answer", [solution, with_two_requests])
def test_08_2_passes(answer):
    expect("08.2", answer, 4, "passed")


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (lambda *a: gather(*a, rounds=a[3] - 2), 0, "the longest way"),
        (lambda *a: gather(*a, receives=0), 0, "(rank - 1 - k)"),
        (lambda *a: gather(*a, receives=2), 0, "(rank - 1 - k)"),
        (lambda *a: gather(*a, own=False), 0, "your own shard: it has a place"),
        (lambda *a: gather(*a, back=-1), 0, "right neighbour"),
        (lambda *a: gather(*a, rounds=0), 0, "never came"),
        (overwrites_its_place, 0, "Your own shard has a place"),
        (never_passes_on, 0, "pass on what came in last"),
        (whole_buffers, 2, "whole buffers"),
        (to_everybody, 0, "right neighbour, (rank + 1)"),
        (blocks, 0, "waits for its own send"),
        (waits_too_early, 0, "waits for its own send"),
        (receives_first, 0, "waits for its message first, nobody sends"),
        (one_buffer, 0, "still being sent"),
        (lambda *a: gather(*a, rounds=a[3]), 2, "one more brings your own back"),
        (mutates, 2, "clone()"),
        (returns_it, 0, "what you return is not looked at"),
        (lambda *_: None, 0, "Nothing was written"),
        (wrong_dtype, 0, "torch.float32"),
        (wrong_length, 0, "a chunk has 3"),
        (scales, 0, "nobody's shard"),
        (one_rank_skips, 0, "fewer rounds"),
        (of_the_whole_group, 0, "not 4"),
        (four_rounds_written_down, 2, "written down"),
        (length_written_down, 0, "must match the size"),
        (lengthens, 0, "no longer 12"),
        (ends_its_process, 0, "\nRank 0 ended with exit code 0"),
        (natively, 0, "This is no ring: _allgather_base_ is no message from one rank"),
        ("a ring", 0, "Give the function itself"),
        (with_comm, 0, "neighbour"),
        (ring_all_gather, 0, "write it yourself"),
        (lambda full: None, 0, "TypeError"),
    ],
)
def test_08_2_near_misses_are_named(answer, points, words):
    expect("08.2", answer, points, words)


def test_08_2_another_way_than_messages_is_no_answer(tmp_path):
    expect("08.2", through_files_in(tmp_path), 0, "another way")


def reduce(shard, full, rank, n, *, start=1, adds=0, rounds=None, own=1, copy=True, over=1):
    """A right ring reduce-scatter, unless something else is asked for."""
    chunks = full.view(n, -1)
    total = chunks[(rank - start) % n]
    total = total.clone() if copy else total
    for k in range(1, n if rounds is None else rounds):
        arrived = torch.empty_like(shard)
        exchange(total, arrived, (rank + 1) % n, (rank - 1) % n)
        total = arrived + own * chunks[(rank - start - k + adds) % n]
    shard.copy_(total // over)


def reducing(shard, full, rank, n):
    reduce(shard, full, rank, n)


def twice_at_the_end(shard, full, rank, n):
    reduce(shard, full, rank, n)
    shard += full.view(n, -1)[rank]


def adds_in_place(shard, full, rank, n):
    chunks = full.view(n, -1)
    for k in range(1, n):
        arrived = torch.empty_like(shard)
        exchange(chunks[(rank - k) % n], arrived, (rank + 1) % n, (rank - 1) % n)
        chunks[(rank - k - 1) % n] += arrived
    shard.copy_(chunks[rank])


def sends_whole_buffers(shard, full, rank, n):
    total, passing = full.clone(), full.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(full)
        exchange(passing, arrived, (rank + 1) % n, (rank - 1) % n)
        total, passing = total + arrived, arrived
    shard.copy_(total.view(n, -1)[rank])


def never_adds(shard, full, rank, n):
    shard.copy_(full.view(n, -1)[rank])


def owner_does_not_add(shard, full, rank, n):
    reduce(shard, full, rank, n)
    if n > 1:
        shard -= full.view(n, -1)[rank]


def only_names_it(shard, full, rank, n):
    shard = full.view(n, -1)[rank]  # noqa: F841


def blocks_in_the_sum(shard, full, rank, n):
    dist.send(full.view(n, -1)[rank - 1], (rank + 1) % n)


def four_ranks_written_down(shard, full, rank, n):
    reduce(shard, full, rank, n, rounds=4)


def random_numbers(shard, full, rank, n):
    shard.copy_(torch.tensor([10**17, 3, 5]))


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (lambda *a: reduce(*a, rounds=a[3] - 1), 0, "ranks [1] are missing: N-1 = 3 rounds end"),
        (lambda *a: reduce(*a, start=0), 0, "another rank owns"),
        (lambda *a: reduce(*a, adds=1), 0, "were added to one another"),
        (lambda *a: reduce(*a, own=2), 0, "2 times"),
        (lambda *a: reduce(*a, own=0), 0, "missing: in N-1 = 3 rounds each adds its own"),
        (only_names_it, 0, "shard = … writes nothing"),
        (lambda *a: reduce(*a, over=a[3]), 0, "divided by N"),
        (twice_at_the_end, 0, "Your own part of chunk 0 is in it 2 times"),
        (adds_in_place, 2, "clone()"),
        (sends_whole_buffers, 2, "whole buffers"),
        (never_adds, 0, "own part alone"),
        (owner_does_not_add, 0, "the owner adds the last"),
        (four_ranks_written_down, 0, "on rank 0 of 3"),
        (random_numbers, 0, "no sum of chunks"),
        (lambda shard, full, rank, n: shard.fill_(0), 0, "no sum of chunks"),
        (lambda *_: None, 0, "Nothing was written"),
        (lambda shard, full, rank, n: dist.reduce_scatter_single(shard, full), 0, "no message"),
        (ring_reduce_scatter, 0, "write it yourself"),
    ],
)
def test_08_3_near_misses_are_named(answer, points, words):
    verdict = check("08.3", answer)
    assert float(verdict) == points, str(verdict)
    assert words.lower() in str(verdict).lower(), str(verdict)


def test_08_3_a_hang_is_named_and_the_next_answer_works_again():
    expect("08.3", blocks_in_the_sum, 0, "waits for its own send")
    expect("08.3", reducing, 4, "passed")


def fitted(sizes, seconds, ranks):
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    rate = (ranks - 1) / ranks / slope
    return (seconds[0] - slope * sizes[0]) / (ranks - 1), rate


def slope_of(sizes, seconds):
    return (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda s, t, n: (fitted(s, t, n)[0] * (n - 1), fitted(s, t, n)[1]), "all N-1 rounds"),
        (lambda s, t, n: (fitted(s, t, n)[0], 1 / slope_of(s, t)), "(N-1)/N of them pass"),
        (lambda s, t, n: (fitted(s, t, n)[0], slope_of(s, t)), "seconds per byte"),
        (lambda s, t, n: (fitted(s, t, n)[0], s[-1] / t[-1]), "as if it were bytes"),
        (lambda s, t, n: (t[0], fitted(s, t, n)[1]), "the whole time of the smallest"),
        (lambda s, t, n: (t[0] / (n - 1), fitted(s, t, n)[1]), "also carries bytes"),
        (lambda s, t, n: fitted(s, t, n)[::-1], "in the other order"),
        (lambda s, t, n: (fitted(s, t, n)[0] / 2, fitted(s, t, n)[1]), "That is an all-reduce"),
        (lambda s, t, n: (fitted(s, t, n)[0], n * fitted(s, t, n)[1]), "A round carries S/N"),
        (lambda s, t, n: (fitted(s, t, n)[0] * 1e6, fitted(s, t, n)[1]), "microseconds"),
        (lambda s, t, n: (fitted(s, t, n)[0], n / (n - 1) / slope_of(s, t)), "multiplied by N"),
        (lambda s, t, n: (fitted(s, t, n)[0] * (n - 1) / n, fitted(s, t, n)[1]), "divided by N"),
        (lambda s, t, n: (fitted(s, t, n)[0] * (n - 1) / 3, fitted(s, t, n)[1]), "`ranks`"),
        (lambda s, t, n: (fitted(s, t, n)[0], fitted(s, t, n)[1] / 1e9), "GB a second"),
        (lambda s, t, n: (fitted(s, t, n)[0], fitted(s, t, n)[1] / 1e6), "MB a second"),
        (lambda s, t, n: (50e-6, 100e6), "2 ranks, 1000 us"),
        (lambda s, t, n: None, "Return two numbers"),
        (lambda s, t, n: (1, 2), "two sizes, and subtract"),
    ],
)
def test_08_4_near_misses_are_named(answer, words):
    expect("08.4", fitted, 2, "passed")
    expect("08.4", answer, 0, words)


def step_time(params, ranks, rate, compute, per_parameter=6, ring=None):
    link = per_parameter * params * ((ranks - 1) / ranks if ring is None else ring) / rate
    return compute + link, max(compute, link)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *a: step_time(*a, per_parameter=12), "3 times data parallelism's"),
        (lambda *a: step_time(*a, per_parameter=3), "3Ψ are the elements"),
        (lambda *a: step_time(*a, per_parameter=4), "gathers once more"),
        (lambda *a: step_time(*a, ring=1), "(N-1)/N is missing"),
        (lambda *a: step_time(*a, ring=a[1] - 1), "all ranks together"),
        (lambda *a: step_time(*a, ring=1 / a[1]), "one chunk"),
        (lambda *a: step_time(*a, per_parameter=48), "bits for bytes"),
        (lambda *a: step_time(*a, per_parameter=2), "one pass"),
        (lambda *a: step_time(*a, per_parameter=8), "gradients of 32 bits"),
        (lambda *a: step_time(*a, per_parameter=18), "3 times 6Ψ"),
        (lambda *a: step_time(*a, ring=7 / 8), "`ranks`"),
        (lambda p, n, b, c: (step_time(p, n, b, c)[0], abs(c - 6 * p * (n - 1) / n / b)), "on top"),
        (lambda *a: step_time(*a)[::-1], "in the other order"),
        (lambda *a: (step_time(*a)[0], step_time(*a)[0] / 2), "only where both are equal"),
        (lambda p, n, b, c: (step_time(p, n, b, c)[0], min(c, 6 * p * (n - 1) / n / b)), "max"),
        (lambda *a: tuple(1e3 * x for x in step_time(*a)), "milliseconds"),
        (lambda *a: (step_time(*a)[0], max(0, step_time(*a)[0] - 2 * a[3])), "also computes"),
        (
            lambda *a: (step_time(*a)[0] - a[3], max(0, step_time(*a)[0] - 2 * a[3])),
            "also computes",
        ),
        (lambda p, n, b, c: step_time(p, n, b, c / n), "each rank's own"),
        (lambda *a: (0.191875, 0.1), "13e9 parameters"),
        (lambda *a: 0.1, "Return two numbers"),
    ],
)
def test_08_6_near_misses_are_named(answer, words):
    expect("08.6", step_time, 2, "passed")
    expect("08.6", answer, 0, words)


def test_the_lecture_s_exercise_3_with_its_missing_inputs_named():
    serial, overlapped = step_time(7e9, 8, 400e9, 0.1)
    assert (serial, overlapped) == (pytest.approx(0.191875), 0.1)


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        ("08.1", "240 MB", [("80 MB", "the others sends"), ("160 MB", "sends twice"),
                            ("320 MB", "to itself"), ("480 MB", "receiving together"),
                            ("120 MB", "the ring"), ("60 MB", "one pass"),
                            (240, "number of MB")]),
        ("08.5", "8 MB", [("1 MB", "a chunk"), ("7 MB", "cancels; N does not"),
                          ("1.143 MB", "one α against"), ("16 MB", "the factor cancels"),
                          ("56 MB", "not there once more"), (8, "number of MB")]),
        ("08.7", "5,250", [(6000, "infinitely many"), (3500, "data parallelism, 4Ψ"),
                        (10500, "receiving together"), (2625, "elements"), (15750, "forward alone"),
                        (42000, "all ranks together"), (5250 * 7e9, "cancels"), (1750, "one pass"),
                        (7875, "backward alone")]),
        ("08.8", "3.25 GB", [("1.625 GB", "elements"), ("6.094 GB", "as printed"),
                             ("73.125 GB", "full sharding"), ("48.75 GB", "replication"),
                             ("26 GB", "eight ranks together"), ("6.5 GB", "receiving together"),
                             ("4.875 GB", "only gradients cross")]),
        ("08.9", "175 GB/s", [("100 GB/s", "algbw"), ("200 GB/s", "itself its own chunk"),
                              ("87.5 GB/s", "an all-reduce is both"), ("350 GB/s", "rated for one"),
                              ("1400 GB/s", "all eight ranks"), ("57.14 GB/s", "You divided"),
                              ("1400 Gb/s", "or bits"), ("1.75 GB", "in a second?")]),
        ("08.9", "175 GB per second", []),
    ],
)  # fmt: skip
def test_numbers_and_their_near_misses(number, right, wrong):
    expect(number, lambda: right, 1, "passed")
    for answer, words in wrong:
        expect(number, answer, 0, words)


def test_the_break_even_size_is_where_both_terms_are_equal():
    latency, rate, ranks = 10e-6, 100e9, 8
    whole = ring_time_s("all_gather", 8e6, ranks, rate, latency)
    assert float(whole) == pytest.approx(2 * (ranks - 1) * latency)
