"""The ring: the sums and the bytes of the other collectives, over one neighbour."""

import pytest
import torch

from zerolab.practice.comm import Comm
from zerolab.practice.meter import Meter
from zerolab.practice.ring import ring_all_gather, ring_reduce_scatter


def both(length, size):
    """Runs on a rank: shard, gathered, what Comm gives for both, and the bytes of each."""
    rank = Comm().rank
    full = torch.arange(size * length) * 7 + 1000 * rank
    before = full.clone()
    shard, gathered = torch.empty_like(full[:length]), torch.empty_like(full)
    sent = []
    for call in (
        lambda: ring_reduce_scatter(shard, full, rank, size),
        lambda: ring_all_gather(gathered, shard, rank, size),
    ):
        with Meter() as meter:
            call()
        sent.append(meter.sent_bytes().get("send", 0))
    return shard, gathered, sent, torch.equal(full, before)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 5])
def test_a_ring_on_some_ranks_of_a_world_gives_exact_sums_and_sends_n_minus_1_chunks(
    world_of, size, length
):
    total = sum(torch.arange(size * length) * 7 + 1000 * rank for rank in range(size))
    results = world_of(4).run(both, length, size, ranks=range(size))
    for rank, (shard, gathered, sent, unchanged) in enumerate(results):
        assert torch.equal(shard, total[rank * length :][:length])
        assert torch.equal(gathered, total)
        assert sent == [(size - 1) * length * 8] * 2
        assert unchanged
