"""The collectives on real ranks: right sums, right bytes, and on the wire what the meter says."""

import pytest
import torch

from zerolab.practice.comm import LONG, Comm, sum_in_rank_order
from zerolab.practice.meter import Meter, loopback_bytes

WORLDS = [1, 2, 3, 4]


def all_three(length, dtype, native=False):
    """Runs on a rank: what each collective gives and sends for shards of `length` elements."""
    comm = Comm(native)
    n = comm.world_size
    full = (torch.arange(n * length) % 100 + 1000 * comm.rank).to(dtype)
    reduced, shard, gathered = (
        full.clone(),
        torch.empty(length, dtype=dtype),
        torch.empty_like(full),
    )
    sent = {}
    for name, call in {
        "reduce_scatter": lambda: comm.reduce_scatter(shard, full),
        "all_gather": lambda: comm.all_gather(gathered, shard),
        "all_reduce": lambda: comm.all_reduce(reduced),
    }.items():
        with Meter() as meter:
            call()
        sent[name] = meter.sent_bytes()
    return shard, gathered, reduced, sent


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_collectives_give_exact_sums_and_send_the_ring_s_bytes(world_of, size, dtype, length):
    base = torch.arange(size * length) % 100
    brought = [(base + 1000 * rank).to(dtype) for rank in range(size)]
    total = sum(b.double() for b in brought).to(dtype)  # rounded once
    element = brought[0].element_size()
    for rank, (shard, gathered, reduced, sent) in enumerate(
        world_of(size).run(all_three, length, dtype)
    ):
        assert torch.equal(shard, total[rank * length : (rank + 1) * length])
        assert torch.equal(gathered, total)
        assert torch.equal(reduced, total)
        shard_bytes = (size - 1) * length * element
        assert sent["reduce_scatter"]["reduce_scatter"] == shard_bytes
        assert sent["all_gather"]["all_gather"] == shard_bytes
        assert sent["all_reduce"]["all_reduce"] == 2 * shard_bytes
        assert sent["all_reduce"]["total"] == 2 * shard_bytes


@pytest.mark.parametrize("size", [1, 3, 4])
def test_native_collectives_give_the_same_sums_and_are_booked_alike(world_of, size):
    ours = world_of(size).run(all_three, 5, torch.int64)
    native = world_of(size).run(all_three, 5, torch.int64, native=True)
    for (*tensors, sent), (*native_tensors, native_sent) in zip(ours, native, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, native_tensors, strict=True))
        assert sent == native_sent


def backend_s_choice():
    return Comm().native


def test_gloo_gets_our_own_collectives(world_of):
    assert world_of(2).run(backend_s_choice) == [False, False]


def into_a_view():
    comm = Comm()
    full = torch.full((8,), float(comm.rank + 1))
    comm.reduce_scatter(full[comm.rank * 2 : comm.rank * 2 + 2], full)
    return full.tolist()


def test_a_shard_may_be_a_view_of_full(world_of):
    for rank, full in enumerate(world_of(4).run(into_a_view)):
        assert full[rank * 2 : rank * 2 + 2] == [10.0, 10.0]


def test_sums_are_rounded_once_and_in_rank_order():
    one, tiny = torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-9]).bfloat16()
    # in bf16 each 2**-9 would be lost against 1; in fp32 the four of them arrive
    assert sum_in_rank_order([one, tiny, tiny, tiny, tiny]).item() == 1 + 2.0**-7
    assert sum_in_rank_order([one, tiny]).dtype == torch.float32
    big = torch.tensor([2.0**24])
    one = torch.tensor([1.0])
    assert sum_in_rank_order([big, one, one]).item() == 2.0**24  # 1 is lost twice
    assert sum_in_rank_order([one, one, big]).item() == 2.0**24 + 2  # first the small ones


def long_all_reduce(dtype):
    comm = Comm()
    everyone = [torch.randn(600_006, generator=torch.manual_seed(rank)).to(dtype)
                for rank in range(comm.world_size)]  # fmt: skip
    full = everyone[comm.rank].clone()
    with Meter() as meter:
        comm.all_reduce(full)
    wanted = sum_in_rank_order(everyone).to(dtype)
    return torch.equal(full, wanted), full.nbytes > LONG, meter.sent_bytes()["all_reduce"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_two_halves_have_the_bits_and_the_bytes_of_the_whole(world_of, size, dtype):
    sent = 2 * (size - 1) * 600_006 // size * dtype.itemsize
    assert world_of(size).run(long_all_reduce, dtype) == [(True, True, sent)] * size


def wrong_length():
    comm, said = Comm(), []
    for call in (
        lambda: comm.all_gather(torch.empty(7), torch.empty(2)),
        lambda: comm.all_reduce(torch.empty(7)),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_shard_of_the_wrong_length_is_refused_before_anything_is_sent(world_of):
    for gathered, reduced in world_of(4).run(wrong_length):
        assert "Pad it first" in gathered and "4 shards" in gathered
        assert "7 elements are no multiple of 4 ranks" in reduced


def much_traffic():
    import time

    import torch.distributed as dist

    comm = Comm()
    full = torch.ones(2_000_000)
    shard = torch.empty(2_000_000 // comm.world_size)
    dist.barrier()
    time.sleep(0.05)
    before = loopback_bytes()
    dist.barrier()
    with Meter() as meter:
        comm.reduce_scatter(shard, full)
        comm.all_gather(full, shard)
    dist.barrier()
    time.sleep(0.05)
    after = loopback_bytes()
    dist.barrier()
    return meter.sent_bytes()["total"], None if before is None else after - before


def test_logical_bytes_agree_with_the_loopback_counter_within_two_percent(world_of):
    world = world_of(4)
    if not world.private_ports:
        pytest.skip("the ranks share the loopback, so its counter is not theirs alone")
    results = world.run(much_traffic)
    logical, wire = sum(sent for sent, _ in results), results[0][1]
    assert logical == 4 * 2 * 3 * 500_000 * 4  # 48 MB: 4 ranks, 2 collectives, 3 peers
    assert abs(wire / logical - 1) < 0.02
