"""The toy device refuses what does not fit; the emulated link takes its time, and only that."""

import time

import pytest
import torch

from zerolab import RankError, World
from zerolab.practice.measure import Job, count
from zerolab.practice.toy import Link, Toy, read_bytes, read_rate, read_seconds


def train(stage):
    return count(Job(stage, steps=2)).held["total"]


def test_a_device_refuses_stage_0_by_kind_and_takes_stage_3():
    with World(4, device_memory="1.6 MB") as world:
        with pytest.raises(RankError, match=r"1,600,000; at this moment: .*optimizer states [0-9]"):
            world.run(train, 0)
        # on four ranks: 16 bytes a parameter shrink to 4, and activations come on top
        assert world.run(train, 3) == [16 * 104_336 // 4] * 4


def keep(name, megabytes):
    from zerolab.practice.launcher.rank import namespace

    namespace()[name] = torch.zeros(megabytes * 250_000)


def test_what_an_earlier_call_keeps_still_fills_the_device():
    with World(1, device_memory="3 MB") as world:
        world.run(keep, "a", 2)
        with pytest.raises(RankError, match="out of memory on the toy device"):
            world.run(keep, "b", 2)
        world.run(keep, "a", 0)
        world.run(keep, "b", 2)


def seconds_of_an_all_gather(megabytes):
    import torch.distributed as dist

    from zerolab.practice.comm import Comm

    comm = Comm()
    shard = torch.zeros(megabytes * 250_000 // comm.world_size)
    full = torch.empty(len(shard) * comm.world_size)
    comm.all_gather(full, shard)
    dist.barrier()
    began = time.monotonic()
    comm.all_gather(full, shard)
    return time.monotonic() - began


def test_an_emulated_link_takes_at_least_alpha_beta_time():
    with World(2, link="10 MB/s", latency="100 ms") as world:
        # one message of half of 2 MB: 0.1 s + 1 MB / 10 MB/s
        assert min(world.run(seconds_of_an_all_gather, 2)) >= 0.2


def test_collectives_queue_on_one_link(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 40.0)
    link = Link(bytes_per_s=100.0, latency_s=1.0)
    assert link.take(3, 200) == 40 + 5
    assert link.take(1, 100) == 40 + 7
    assert link.busy_s == 7.0, "3 + 2 seconds, then 1 + 1, whatever the clock says"


def test_amounts_are_read_with_their_units():
    assert (read_bytes("64 MB"), read_bytes("1 MiB"), read_bytes(2e9)) == (
        64_000_000,
        2**20,
        2 * 10**9,
    )
    assert read_bytes(0.5) == 1, "more than nothing, and a whole number"
    assert (read_rate("100 MB/s"), read_rate(5e7)) == (1e8, 5e7)
    assert read_seconds("50 us") == pytest.approx(5e-5)
    assert (read_seconds("2 ms"), read_seconds(0.5)) == (2e-3, 0.5)
    assert Toy.read(None, None, None) == Toy()
    assert Toy.read("1 GB", None, "1 ms") == Toy(10**9, Link(float("inf"), 1e-3))


@pytest.mark.parametrize(
    "bad", ["64 parsecs", "-1 MB", 0, "", True, "MB", "1.2.3 MB", [], "1e400", 10**400]
)
@pytest.mark.parametrize("name", ["device_memory", "link", "latency"])
def test_what_is_no_amount_is_refused_in_a_sentence(name, bad):
    with pytest.raises(ValueError, match=rf"^{name} is .* such as '[0-9]+ .*'\.$") as caught:
        World(2, **{name: bad})
    assert caught.value._render_traceback_() == [f"ValueError: {caught.value}"]
