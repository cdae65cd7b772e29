"""Shards cover every element once, for every size and world size."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerolab.practice.sharding import (
    flatten,
    halves,
    join,
    padded_numel,
    shard_numel,
    shard_of,
    shard_range,
    views,
)

sizes = st.integers(0, 5000)
worlds = st.integers(1, 70)


@given(sizes, worlds)
def test_every_element_has_exactly_one_owner(numel, world_size):
    owned = []
    for rank in range(world_size):
        start, stop = shard_range(numel, world_size, rank)
        assert start <= stop
        owned += range(start, stop)
    assert owned == list(range(numel))


@given(sizes, worlds)
def test_shards_are_equally_long_and_padding_is_less_than_one_element_a_rank(numel, world_size):
    assert shard_numel(numel, world_size) * world_size == padded_numel(numel, world_size)
    assert 0 <= padded_numel(numel, world_size) - numel < world_size


@given(sizes, worlds)
def test_halves_are_cut_where_shards_stay_whole_vectors(numel, world_size):
    padded = padded_numel(numel, world_size)
    first, *second = halves(padded, world_size)
    cuts = [first.start, *(part.stop for part in (first, *second))]
    assert cuts == sorted({0, first.stop, padded}) or numel == 0
    assert [part.start for part in second] == cuts[1:-1] and len(second) <= 1
    assert all(cut % world_size == 0 for cut in cuts)
    if second:
        assert first.stop % (64 * world_size) == 0
        assert second[0].stop - second[0].start <= first.stop


@given(st.integers(1, 300), st.integers(1, 9))
def test_join_undoes_shard_of(numel, world_size):
    flat = flatten([torch.arange(numel)], padded_numel(numel, world_size), torch.int64)
    shards = [shard_of(flat, world_size, rank) for rank in range(world_size)]
    assert join(shards, numel).tolist() == list(range(numel))


def test_trailing_ranks_may_own_nothing():
    assert [shard_range(2, 4, rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    # 57 elements on 2 ranks: 29 and 28 real ones, one element of padding
    assert [shard_range(57, 2, rank) for rank in range(2)] == [(0, 29), (29, 57)]
    assert padded_numel(32, 2048) == 2048


def test_views_are_the_parameters_and_share_their_memory():
    tensors = [torch.arange(6.0).view(2, 3), torch.zeros(0), torch.tensor(7.0)]
    flat = flatten(tensors, 8, torch.float32)
    parts = views(flat, [t.shape for t in tensors])
    assert all(torch.equal(part, t) for part, t in zip(parts, tensors, strict=True))
    parts[0][1, 2] = -1
    assert flat.tolist() == [0, 1, 2, 3, 4, -1, 7, 0]
