"""The checks of lesson 05, run on real ranks: stub, solution, and near misses with their words."""

import gc
import os
import re

import pytest
import torch
from test_checks_04 import expect, stub

from zerolab import check, hint
from zerolab.practice.sharding import shard_of
from zerolab.practice.stage1 import Stage1


@pytest.mark.parametrize("number", ["05.1", "05.2", "05.3", "05.4", "05.5"])
@pytest.mark.parametrize("answer", [stub, None, ...])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


def test_05_1_prediction():
    expect("05.1", lambda: 7, 1, "passed")
    for wrong, words in [(16, "plain data parallelism"), (4, "stage 3"), (5.5, "eight ranks"),
                         (3, "optimizer states alone"), (6, "master weights"),
                         (28, "one rank's bytes")]:  # fmt: skip
        expect("05.1", lambda wrong=wrong: wrong, 0, words)


@pytest.mark.parametrize(
    "answer", ["7 bytes/parameter", "7 bytes per parameter", "7 B / parameter"]
)
def test_bytes_for_one_parameter_are_read_where_they_are_asked_for(answer):
    expect("05.1", answer, 1, "passed")
    expect("05.5", answer, 0, "for one parameter")
    expect("05.5", "71.5 GB per parameter", 0, "for one parameter")
    expect("05.5", "71.5 GB/rank", 1, "passed")


@pytest.mark.parametrize("number", ["02.5", "03.1", "05.1", "06.3", "07.1", "07.4", "08.5", "13.1"])
def test_who_only_prints_is_told_to_return(number):
    expect(number, lambda: None, 0, "not yet", "nothing (None)", "Return it")


def own_slice(numel, world_size, rank):
    length = -(-numel // world_size)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def rounded_down(numel, world_size, rank):
    length = numel // world_size
    return rank * length, (rank + 1) * length


def last_takes_the_rest(numel, world_size, rank):
    length = numel // world_size
    return rank * length, numel if rank == world_size - 1 else (rank + 1) * length


def padding_owned(numel, world_size, rank):
    length = -(-numel // world_size)
    return rank * length, (rank + 1) * length


def balanced(numel, world_size, rank):
    each, rest = divmod(numel, world_size)
    start = rank * each + min(rank, rest)
    return start, start + each + (rank < rest)


def inclusive(numel, world_size, rank):
    start, stop = own_slice(numel, world_size, rank)
    return start, stop - 1


def with_length(numel, world_size, rank):
    start, stop = own_slice(numel, world_size, rank)
    return start, stop - start


def overlapping(numel, world_size, rank):
    start, stop = own_slice(numel, world_size, rank)
    return start, min(stop + 1, numel)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (rounded_down, "owned by nobody"),
        (last_takes_the_rest, "round up"),
        (padding_owned, "that is padding"),
        (balanced, "multiples of 3"),
        (inclusive, "ends before its stop"),
        (with_length, "give the end"),
        (lambda n, w, r: own_slice(n, w, r - 1), "ranks count from 0"),
        (overlapping, "owned by two ranks"),
        (lambda n, w, r: (r * (n // w + 1), (r + 1) * (n // w + 1)), "that is padding"),
        (lambda n, w, r: (min(r * (n // w + 1), n), min((r + 1) * (n // w + 1), n)), "longer than"),
        (lambda n, w, r: (0, 10**15), "that is padding"),
        (lambda n, w, r: (r * -(-n // w), min((r + 1) * -(-n // w), n)), "beyond its stop"),
        (lambda n, w, r: (r * n / w, (r + 1) * n / w), "Return two ints"),
        (lambda n, w, r: None, "where a rank owns nothing"),
    ],
)
def test_05_2_near_misses_are_named(answer, words):
    expect("05.2", answer, 0, words)


def test_05_2_passes():
    expect("05.2", own_slice, 2, "passed")


def own_states(weights, world_size, rank):
    master = shard_of(weights, world_size, rank).clone()
    return master, torch.zeros_like(master), torch.zeros_like(master)


def view(weights, world_size, rank):
    master = shard_of(weights, world_size, rank)
    return master, torch.zeros_like(master), torch.zeros_like(master)


def copied_by_float(weights, world_size, rank):
    master = shard_of(weights, world_size, rank).float()  # fp32 already: the same view
    return master, torch.zeros_like(master), torch.zeros_like(master)


def whole(weights, world_size, rank):
    return weights, torch.zeros_like(weights), torch.zeros_like(weights)


def shared_moments(weights, world_size, rank):
    master, moment, _ = own_states(weights, world_size, rank)
    return master, moment, moment


def small_moments(weights, world_size, rank):
    master, momentum, variance = own_states(weights, world_size, rank)
    return master, momentum.bfloat16(), variance


def always_first(weights, world_size, rank):
    return own_states(weights, world_size, 0)


def four_written_out(weights, world_size, rank):
    return own_states(weights, 4, rank)


def shared_beside_another(weights, world_size, rank):
    kept_alive.append(own_states(weights, world_size, rank)[0])
    return shared_moments(weights, world_size, rank)


kept_alive = []


def moments_of_weights(weights, world_size, rank):
    master, _, variance = own_states(weights, world_size, rank)
    return master, master.clone(), variance


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (view, "keeps the whole tensor"),
        (copied_by_float, ".float() makes none"),
        (whole, "plain data parallelism"),
        (shared_moments, "share their memory"),
        (shared_beside_another, "share their memory"),
        (four_written_out, "the shard (1001,)"),
        (small_moments, "all three states are fp32"),
        (always_first, "slice of rank 0"),
        (moments_of_weights, "do not start from zero"),
        (lambda w, n, r: own_states(w, n, r)[0], "tuple of three"),
    ],
)
def test_05_3_near_misses_are_named(answer, words):
    assert words.lower() in str(expect("05.3", answer, 0)).lower()


def test_05_3_passes():
    expect("05.3", own_states, 2, "passed")


def step(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def all_reduces(own, comm):
    comm.all_reduce(own.full_grads)
    own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def all_reduces_natively(own, comm):
    import torch.distributed as dist

    dist.all_reduce(own.full_grads)
    own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def forgets_the_mean(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=1)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def never_reduces(own, comm):
    own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def never_gathers(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
    own.param_shard.copy_(own.adamw.master)


def never_copies(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
    comm.all_gather(own.full_params, own.param_shard)


def gathers_fp32(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
    every_master = torch.empty(own.full_params.numel())
    comm.all_gather(every_master, own.adamw.master)
    own.full_params.copy_(every_master)


def keeps_a_copy(own, comm):
    step(own, comm)
    own.adamw.kept = own.full_grads.clone()


def scales_for_four(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=1 / 4)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def scales_by_the_number_of_ranks(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=comm.world_size)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def divides_first(own, comm):
    own.full_grads /= comm.world_size
    forgets_the_mean(own, comm)


def divides_twice(own, comm):
    own.full_grads /= comm.world_size
    step(own, comm)


def sums_and_never_gathers(own, comm):
    comm.reduce_scatter(own.grad_shard, own.full_grads)
    own.adamw.update(own.grad_shard, scale=1)
    own.param_shard.copy_(own.adamw.master)
    own.full_params.view(comm.world_size, -1)[comm.rank].copy_(own.param_shard)


def raises(own, comm):
    own.grads.sum()


def one_rank_skips(own, comm):
    if comm.rank:
        step(own, comm)


def uses_the_package(own, comm):
    Stage1.step(own)


def asks_for_its_step(own, comm):
    own.step()


def test_05_4_passes():
    expect("05.4", step, 4, "passed")


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (all_reduces, 2, "6Ψ"),
        (forgets_the_mean, 0, "forgot the 1/N"),
        (never_reduces, 0, "never summed"),
        (never_gathers, 0, "stale"),
        (never_copies, 0, "copy the one into the other"),
        (gathers_fp32, 2, "gather param_shard"),
        (keeps_a_copy, 2, "still referenced"),
        (lambda own, comm: None, 0, "Nothing was updated"),
        (scales_for_four, 0, "On three: "),
        (raises, 0, "AttributeError"),
        (lambda own: None, 0, "TypeError"),
    ],
)
def test_05_4_near_misses_are_named(answer, points, words):
    expect("05.4", answer, points, words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (divides_first, "On three: .*up to rounding. Sum first, and let scale divide"),
        (scales_by_the_number_of_ranks, "scale is not 1/N: .* 16 times the mean"),
        (scales_for_four, "On three: .*scale is not 1/N: .* 0.75 times the mean"),
        (divides_twice, "scale is not 1/N: .* 0.25 times the mean"),
        (sums_and_never_gathers, "forgot the 1/N.*the others' slices are stale"),
        (never_gathers, "others' are stale"),
    ],
)
def test_05_4_a_wrong_scale_is_neither_stale_nor_rounding(answer, words):
    said = str(expect("05.4", answer, 0)).replace("\n", " ")
    assert re.search(words, said), said
    assert ("stale" in said) == (answer in (never_gathers, sums_and_never_gathers)), said


def test_05_4_native_all_reduce_is_seen_too():
    assert float(check("05.4", all_reduces_natively)) < 4


def test_05_4_calling_the_package_s_own_stage_is_no_answer():
    expect("05.4", uses_the_package, 0, "yourself")
    expect("05.4", asks_for_its_step, 0, "no attribute 'step'")


def test_05_4_a_hang_is_named_and_the_next_answer_works_again():
    expect("05.4", one_rank_skips, 0, "did not come back")
    expect("05.4", step, 4, "passed")


def test_05_2_takes_lists_and_other_integers():
    import numpy as np

    expect("05.2", lambda n, w, r: [np.int64(x) for x in own_slice(n, w, r)], 2)


def rebinds(own, comm):
    step(own, comm)
    own.full_params = own.full_params.clone()


def sums_in_another_order(own, comm):
    wide = own.full_grads.float()
    comm.all_reduce(wide)
    shard = wide[comm.rank * len(own.grad_shard) :][: len(own.grad_shard)].clone()
    own.adamw.update(shard, scale=1 / comm.world_size)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def leaves_a_send_behind(own, comm):
    step(own, comm)
    own.adamw.kept = comm.start_all_gather(own.full_params, own.param_shard)


def changes_the_default(own, comm):
    step(own, comm)
    torch.set_default_dtype(torch.float64)


def test_05_4_more_near_misses():
    expect("05.4", rebinds, 0, "another tensor")
    expect("05.4", sums_in_another_order, 0, "up to rounding")


@pytest.mark.parametrize("answer", [leaves_a_send_behind, changes_the_default])
def test_what_an_answer_does_to_the_ranks_does_not_reach_the_next(answer):
    check("05.4", answer)
    expect("05.4", step, 4)


def test_the_checks_own_world_is_not_the_notebook_s():
    from zerolab.practice.world import latest_world

    check("05.4", step)
    found = latest_world()
    assert found is None or not found.private


def test_an_answer_that_exits_or_never_ends_gets_a_verdict(monkeypatch):
    def for_ever(*_):
        while True:
            pass

    expect("05.2", lambda *_: exit(3), 0, "SystemExit")
    monkeypatch.setattr("zerolab.course.checks.core.LIMIT_S", 0.5)
    expect("05.2", for_ever, 0, "did not end")


def test_a_check_that_collects_garbage_looks_at_the_answer_s_alone():
    """A search through all of torch's objects, seven times, took as long as the answer may."""
    set_aside = []

    def looks(start, world_size, rank):
        set_aside.append(gc.get_freeze_count())
        return own_states(start, world_size, rank)

    gc.unfreeze()
    try:
        expect("05.3", looks, 2)
        left = gc.get_freeze_count()
    finally:
        gc.freeze()
    assert min(set_aside) > 100_000 and left == 0


@pytest.mark.parametrize(
    ("given", "load", "times"),
    [
        ("", 0.0, 1),
        ("1", 0.0, 1),
        ("2.5", 0.0, 2.5),
        ("0", 0.0, 1),
        ("2", 6.0, 6),
        ("1", 99.0, 8),
        ("inf", 0.0, 60),
        ("nan", 0.0, 1),
    ],
)
def test_answers_have_more_time_where_the_machine_is_busy_or_nobody_waits(
    monkeypatch, given, load, times
):
    from zerolab.course import kept

    monkeypatch.setenv(kept.PATIENCE, given or "1")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert kept.patience() == times
    assert kept.limit_s() == times * kept.TIMEOUT_S


def test_a_patience_that_is_no_number_is_said(monkeypatch):
    from zerolab.course import kept

    monkeypatch.setenv(kept.PATIENCE, "long")
    with pytest.warns(UserWarning, match="ZEROLAB_PATIENCE is not a number: 'long'"):
        assert kept.patience() >= 1


def test_the_start_of_the_ranks_is_not_the_answer_s_time(monkeypatch):
    from zerolab.course import kept
    from zerolab.course.checks import core

    seen = []

    class Slow(kept.World):
        def run(self, fn, *args, **kwargs):
            if fn is kept._ready:
                seen.append(core.signal.getitimer(core.signal.ITIMER_REAL)[0])
            return super().run(fn, *args, **kwargs)

    monkeypatch.setattr(kept, "World", Slow)
    monkeypatch.setattr(kept, "_kept", {})
    monkeypatch.setattr(kept, "_used", set())
    expect("05.4", step, 4)
    for world in kept._kept.values():
        world.close()
    assert seen == [0.0] * 3, "four ranks, one for the right values, and three"


def not_implemented_in_torch(own, comm):
    torch.zeros(3, device="meta").cpu()


def test_only_the_stub_counts_as_not_attempted():
    expect("05.4", not_implemented_in_torch, 0, "not yet", "in line")


def test_05_5_numbers():
    expect("05.5", lambda: "71.5 GB", 1)
    expect("05.5", "66.59 GiB", 1)
    expect("05.5", "71,5 GB", 1)
    expect("05.5", "71,500,000,000 bytes", 1)
    for wrong, words in [("208 GB", "plain data"), ("26 GB", "stage 3"), ("48.75 GB", "stage 2"),
                         ("19.5 GB", "optimizer states alone"), ("572 GB", "all ranks together"),
                         ("65 GB", "master copy"), ("52 GB", "limit"), ("66.59 GB", "GiB"),
                         (71.5, "number of GB")]:  # fmt: skip
        expect("05.5", wrong, 0, words)


def test_hints_unfold_one_inside_the_other():
    html = hint("05.4")._repr_html_()
    assert html.count("<details>") == 4
    assert html.index("Hint 1") < html.index("Hint 2") < html.index("Hint 4")
    assert html.endswith("</details></details></details></details>")
