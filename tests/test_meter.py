"""The meter counts storages, finds what nobody told it of, and forgets what is freed."""

import gc
import weakref

import pytest
import torch

from zerolab import RankError
from zerolab.practice.meter import Meter, label, steady, young_garbage


def test_a_view_adds_nothing_and_keeps_the_whole_storage():
    with Meter() as meter:
        whole = torch.zeros(1000)
        part = whole[10:20].view(2, 5).T
        assert meter.held()["other"] == 4000
        del whole
        assert meter.held()["other"] == 4000
        del part
        assert meter.held()["total"] == 0


def test_kinds_come_from_labels_and_the_rest_is_other():
    with Meter() as meter:
        a = label(torch.zeros(100, dtype=torch.bfloat16), "parameters")
        b = torch.zeros(10)
        held = meter.held()
    assert (held["parameters"], held["other"], held["total"]) == (200, 40, 240)
    assert a.numel() + b.numel() == 110


def test_a_label_given_late_moves_the_bytes():
    with Meter() as meter:
        a = torch.zeros(10)
        assert meter.held()["other"] == 40
        label(a, "gradients")
        assert (meter.held()["gradients"], meter.held()["other"]) == (40, 0)


def test_what_autograd_saves_is_found_and_forgotten_after_backward():
    weight = torch.nn.Parameter(torch.ones(50, 50))
    with Meter() as meter:
        x = torch.ones(8, 50)
        y = (x @ weight).exp()
        loss = (y * y).sum()
        del x, y
        assert meter.held()["other"] >= 2 * 8 * 50 * 4 + 50 * 50 * 4
        loss.backward()
        del loss
        weight.grad = None
        assert meter.held()["total"] == 50 * 50 * 4  # the weight alone


def test_gradients_that_nobody_mentions_are_found():
    layer = torch.nn.Linear(10, 20)
    with Meter() as meter:
        layer(torch.ones(1, 10)).sum().backward()
        held = meter.held()["total"]
    assert held == 2 * (200 + 20) * 4


def test_a_resized_storage_is_counted_with_its_new_size():
    with Meter() as meter:
        a = torch.zeros(1000)
        a.untyped_storage().resize_(0)
        assert meter.held()["total"] == 0
        a.untyped_storage().resize_(2000)
        assert meter.held()["total"] == 2000


def test_the_peak_remembers_what_was_freed_and_what_it_was_made_of():
    with Meter() as meter:
        kept = label(torch.zeros(100), "parameters")
        gone = torch.zeros(900)
        del gone
        assert meter.held()["total"] == 400
        assert meter.peak == 4000
        assert meter.peak_by_kind == {"parameters": 400, "other": 3600}
        meter.reset_peak()
        assert meter.peak == 400
    assert kept.numel() == 100


def test_a_timeline_has_each_part_s_own_peak():
    with Meter() as meter:
        kept = label(torch.zeros(100), "parameters")
        assert meter.timeline == []
        meter.mark("first")
        gone = torch.zeros(900)
        del gone
        meter.mark("second")
        more = label(torch.zeros(50), "gradients")
        assert meter.timeline == [
            ("first", {"parameters": 400, "other": 3600}),
            ("second", {"parameters": 400, "gradients": 200}),
        ]
        del more
        meter.mark("third")
        assert meter.timeline[-1] == ("third", {"parameters": 400})
        meter.reset_peak()
        assert meter.timeline == []
    assert kept.numel() == 100


def native_collectives():
    import torch.distributed as dist

    from zerolab.practice.meter import sending_as

    full, shard = torch.ones(12), torch.ones(3)
    counted = {}
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(full),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, full),
        "all_gather": lambda: dist.all_gather_single(full, shard),
        "reduce": lambda: dist.reduce(full, dst=0),
    }.items():
        with Meter() as meter:
            call()
        counted[name] = meter.sent_bytes()
    with Meter() as meter, sending_as("control"):
        dist.all_reduce(torch.ones(1, dtype=torch.float64))
    counted["control"] = meter.sent_bytes()
    return counted


def test_native_collectives_are_booked_with_their_ring_s_bytes(world_of):
    for counted in world_of(4).run(native_collectives):
        assert counted["all_reduce"]["all_reduce"] == 2 * 48 * 3 // 4
        assert counted["reduce_scatter"]["reduce_scatter"] == 48 * 3 // 4
        assert counted["all_gather"]["all_gather"] == 48 * 3 // 4
        assert counted["reduce"]["reduce"] == counted["reduce"]["total"] == 48 * 3 // 4


def test_control_is_booked_apart(world_of):
    for counted in world_of(4).run(native_collectives):
        assert counted["control"]["control"] == 2 * 8 * 3 // 4
        assert counted["control"]["total"] == 0


@pytest.mark.parametrize("kind", ["parameters", "temporary"])
def test_a_label_survives_in_every_view(kind):
    part = label(torch.zeros(10), kind)[3:]
    with Meter() as meter:
        part.add_(1)
        assert meter.held()[kind] == 40


def leaves_things_on():
    torch.set_grad_enabled(False)
    Meter().__enter__()
    raise ValueError("on purpose")


def what_is_on():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack())


def test_a_call_that_was_torn_off_leaves_no_mode_and_no_no_grad_to_the_next(world_of):
    with pytest.raises(RankError, match="on purpose"):
        world_of(2).run(leaves_things_on)
    assert world_of(2).run(what_is_on) == [(True, 0)] * 2


def test_garbage_is_sought_among_what_came_since_and_what_was_set_aside_stays_so():
    class Ring:
        def __init__(self):
            self.ring = self

    gc.unfreeze()  # whatever the tests before this one have set aside, or set free again
    gc.disable()  # no collection but the test's own
    try:
        old = weakref.ref(Ring())
        with young_garbage():
            young = weakref.ref(Ring())
            gc.collect()
            assert (old() is None, young() is None) == (False, True)
        gc.collect()
        assert old() is None and gc.get_freeze_count() == 0
    finally:
        gc.enable()
        gc.freeze()
    before = gc.get_freeze_count()
    assert before > 100_000
    with young_garbage():
        assert before / 2 < gc.get_freeze_count() <= before
    assert before / 2 < gc.get_freeze_count() <= before
    loaded_later = [[] for _ in range(60_000)]
    with young_garbage():
        assert gc.get_freeze_count() > before + len(loaded_later) / 2
    gc.freeze()


def test_a_count_is_steady_once_it_stays(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    counts = iter([9, 9, 9, 9, 8, 7, 7, 7, 7, 7, 6])
    assert steady(lambda: next(counts)) == 7
