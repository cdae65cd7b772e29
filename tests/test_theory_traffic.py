"""Bytes sent: the ring, the stages, accumulation, element sizes and hybrid sharding."""

import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.theory import (
    COLLECTIVES,
    RECIPES,
    STAGES,
    derive_accumulation,
    derive_hybrid,
    derive_ratio,
    derive_ring,
    derive_sent,
    derive_three_times,
    padding,
    ring_time_s,
    sent,
    sent_bytes,
)
from zerolab.theory.notation import A, B, G, N_d, Psi, S, W, alpha
from zerolab.theory.traffic import HYBRID, SCHEDULES

sizes = st.integers(1, 10**9)
ranks = st.integers(1, 2000)


def test_volumes_of_the_stages_are_4_4_4_6_psi():
    assert [derive_sent(stage).result for stage in STAGES] == [4 * Psi, 4 * Psi, 4 * Psi, 6 * Psi]
    assert derive_sent("lecture-stage-1").result == 6 * Psi


def test_stage_3_sends_three_halves_of_data_parallelism_and_not_three_times():
    assert derive_ratio(3).result == sp.Rational(3, 2)
    assert [derive_ratio(stage).result for stage in (1, 2)] == [1, 1]
    assert derive_ratio("lecture-stage-1").result == sp.Rational(3, 2)
    assert derive_three_times().result == 3
    assert derive_three_times().unit == "bytes per element"


def test_collectives_of_stage_3_are_two_gathers_and_a_reduce_scatter():
    assert sent(3) == {"all_reduce": 0, "reduce_scatter": 2 * Psi, "all_gather": 4 * Psi}
    names = [name for name, _ in derive_sent(3).steps[0].parts]
    assert names == ["all_gather, forward", "all_gather, backward", "reduce_scatter"]


@pytest.mark.parametrize(
    ("stage", "rule", "at_1", "at_4"),
    [
        (0, 2 * Psi, 2, 2),
        ("ddp-every-backward", 2 * A * Psi, 2, 8),
        (1, 2 * Psi, 2, 2),
        (2, (A + 1) * Psi, 2, 5),
        (3, 3 * A * Psi, 3, 12),
    ],
)
def test_accumulation(stage, rule, at_1, at_4):
    result = derive_accumulation(stage).result
    assert sp.expand(result - rule) == 0
    assert [result.subs({A: k, Psi: 1}) for k in (1, 4)] == [at_1, at_4]
    assert [sent_bytes(stage, 2, 2, micro_batches=k)["total"] for k in (1, 4)] == [
        2 * at_1, 2 * at_4,
    ]  # fmt: skip


def test_reducing_in_fp32_makes_stage_3_equal_to_data_parallelism_in_bytes():
    for stage in (0, 3):
        assert derive_sent(stage, "adamw-mixed-fp32-grads").result == 8 * Psi
        assert derive_sent(stage, reduce_bytes=4).result == 8 * Psi
    assert derive_ratio(3, reduce_bytes=4).result == 1
    assert derive_sent(3, "fsdp2-mixed").result == 6 * Psi
    assert derive_sent(0, "adamw-autocast").result == 8 * Psi


def test_ring():
    assert sp.expand(derive_ring("reduce_scatter").result - S * (N_d - 1) / N_d) == 0
    assert derive_ring("all_reduce").result == 2 * derive_ring("all_gather").result
    time = ring_time_s("all_reduce")
    assert sp.expand(time - 2 * (N_d - 1) * (alpha + S / (N_d * B))) == 0
    assert sp.expand(time - 2 * ring_time_s("all_gather")) == 0
    assert ring_time_s("all_gather", 10**10, 8, 3 * 10**11, 0) == sp.Rational(35, 1200)


@given(st.sampled_from(STAGES), ranks, sizes, st.sampled_from(sorted(RECIPES)), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_exact_bytes_are_the_exact_formula_on_padded_sizes(stage, n, params, recipe, times):
    padded = params + padding(params, n)
    counted = sent_bytes(stage, n, params, recipe, micro_batches=times)
    formula = sent(stage, recipe, micro_batches=times, exact=True)
    for name in COLLECTIVES:
        assert counted[name] == formula[name].subs({Psi: padded, N_d: n})
    assert counted["total"] == sum(counted[name] for name in COLLECTIVES)


@given(st.sampled_from(list(SCHEDULES)), sizes)
def test_one_rank_sends_nothing(stage, params):
    assert set(sent_bytes(stage, 1, params).values()) == {0}


@given(ranks, sizes, st.lists(st.integers(0, 1000), min_size=1, max_size=5))
@settings(deadline=None)
def test_units_only_add_padding(n, params, extra):
    units = [params, *extra]
    apart = sent_bytes(3, n, sum(units), units=units)["total"]
    flat = sent_bytes(3, n, sum(units))["total"]
    assert 0 <= apart - flat <= 6 * len(units) * n


@given(sizes, ranks)
def test_exact_volume_stays_below_the_papers_form(params, n):
    for stage in STAGES:
        total = sum(sent(stage).values()).subs(Psi, params + padding(params, n))
        assert sent_bytes(stage, n, params)["total"] < total


def test_hybrid_sharding_exact_and_as_printed():
    assert sp.cancel(derive_hybrid().result / Psi - HYBRID["hybrid"]) == 0
    two_hosts = {name: volume.subs({W: 16, G: 8}) for name, volume in HYBRID.items()}
    assert two_hosts["hybrid"] == sp.Rational(1, 8)
    assert two_hosts["hybrid as printed"] == sp.Rational(15, 64)
    assert two_hosts["full"] == sp.Rational(45, 16)
    assert HYBRID["hybrid"].subs(G, 1) == HYBRID["replicate"]
    assert sp.cancel(HYBRID["hybrid"].subs(G, W)) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sent_bytes(3, 4, 10, micro_batches=0), "micro_batches must be a whole number"),
        (lambda: sent_bytes(3, 4, 10, reduce_bytes=0), "reduce_bytes must be"),
        (lambda: sent_bytes("stage-1", 4, 10), "the nearest are lecture-stage-1"),
        (lambda: derive_ring("broadcast"), "possible are|nearest are"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(call, says):
    with pytest.raises(ValueError, match=says):
        call()
