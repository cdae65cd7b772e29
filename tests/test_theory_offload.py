"""Offload, partitions, activations and number formats."""

from itertools import combinations

import pytest
import sympy as sp
from hypothesis import given
from hypothesis import strategies as st

from zerolab.course.oracles import delayed
from zerolab.course.partition import even_shards, greedy_shards, row_shards, touched_shards
from zerolab.theory.memory import held_bytes, padding
from zerolab.theory.notation import A, L, N_d, Psi, a, b, h, s, t
from zerolab.theory.offload import (
    MOVABLE,
    bandwidth_for,
    below,
    blocks,
    cut,
    cuts,
    derive_crossing,
    derive_intensity,
    efficiency,
)
from zerolab.theory.precision import BF16, FP16, FP32, derive_loss_scale
from zerolab.theory.residual import activation_bytes, derive_activations, fused_buffer

sizes = st.integers(0, 10**6)
ranks = st.integers(1, 300)


def test_no_split_crosses_less_than_4_bytes_a_parameter():
    best = cuts()[0]
    assert (best.crossing, best.on_gpu) == (4, 2)
    assert set(best.on_cpu) == {"grad16", "states", "update", "float2half"}
    assert len(cuts()) == sum(1 for k in range(1, 6) for _ in combinations(MOVABLE, k)) == 31
    assert all(way.crossing >= 4 for way in cuts())


def test_cutting_at_an_fp32_edge_or_moving_the_parameters_costs_6_or_more():
    assert cut("grad16", "states", "update").crossing == 6
    assert cut("param16", "grad16", "states", "update", "float2half").crossing == 6
    assert cut("states").crossing == 24
    with pytest.raises(ValueError, match="Node"):
        cut("activations")


def test_a_rank_s_share_of_4_bytes_a_parameter_crosses_the_edge():
    assert derive_crossing().result == 4 * Psi / N_d
    streamed = derive_crossing(streamed=True)
    assert streamed.steps[-2].expr == 2 * Psi * (A + 1) / N_d
    assert streamed.result == 4 * Psi / N_d
    everything = derive_crossing(streamed=True, parameters_below=True)
    assert everything.steps[-2].expr == 6 * A * Psi / N_d
    assert derive_crossing(parameters_below=True).result == 6 * Psi / N_d


@given(st.integers(1, 10**6), st.integers(1, 64), st.sampled_from([1, 2, 3]), st.integers(1, 4))
def test_what_leaves_the_gpu_is_below_it_and_nothing_else(params, n, stage, micro_batches):
    padded = params + padding(params, n)
    states = 12 * padded // n
    for on in ("cpu", "nvme"):
        for schedule in ("plain", "stream", "delayed"):
            there = below(stage, n, params, None, "adamw-mixed", on, "gpu", schedule, micro_batches)
            kept = held_bytes(stage, n, params)
            assert there.gpu["parameters"] == kept["parameters"]
            assert there.gpu["gradients"] == (0 if schedule == "stream" else kept["gradients"])
            assert there.cpu["optimizer_states"] == (states if on == "cpu" else 0)
            assert there.read == (blocks(states) if on == "nvme" else 0)
            assert there.written == (there.read + 4096 if on == "nvme" else 0)
            times = micro_batches if schedule == "stream" else 1
            assert (n * there.down, n * there.up) == (2 * times * padded, 2 * padded)


def test_parameters_below_come_up_for_both_gathers_of_every_micro_batch():
    for on, micro_batches in (("cpu", 1), ("nvme", 3)):
        there = below(3, 4, 1000, [600, 400], "adamw-mixed", "cpu", on, "plain", micro_batches)
        assert there.gpu["parameters"] == 0
        assert (there.down, there.up) == (2 * 250, 2 * micro_batches * 2 * 250)
        assert there.read == (2 * 3 * 2 * 4096 if on == "nvme" else 0)


def test_arithmetic_intensities_of_zero_infinity():
    assert derive_intensity("parameters and gradients").result == s * b
    assert derive_intensity("optimizer states").result == s * b / 4
    ci = sp.Symbol("ci", positive=True, integer=True)
    assert derive_intensity("checkpoints").result == 24 * h * ci


@given(st.integers(1, 99), st.integers(1, 10**5))
def test_bandwidth_and_efficiency_are_inverse(percent, intensity):
    share = sp.Rational(percent, 100)
    bandwidth = bandwidth_for(share, intensity)
    reached = bandwidth * intensity / (bandwidth * intensity + 70 * 10**12)
    assert reached == share
    assert efficiency(intensity, int(bandwidth) + 1) >= share


def test_a_delayed_update_first_does_nothing():
    one, lr = sp.Integer(1), sp.Rational(1, 10)
    assert delayed(one, lr, 4)[0] == 1
    assert delayed(one, lr, 3, delay=0) == [sp.Rational(8, 10) ** k for k in (1, 2, 3)]


@given(sizes, ranks, st.sampled_from([1, 2]))
def test_shards_cover_each_element_once(numel, n, multiple):
    shards = even_shards(numel, n, multiple)
    assert len(shards) == n and sum(shards) == numel and min(shards) >= 0
    assert list(shards) == sorted(shards, reverse=True), "only trailing ranks fall short"
    assert max(shards, default=0) <= -(-numel // n) + multiple - 1


@given(st.lists(st.integers(0, 10**6), max_size=40), ranks)
def test_greedy_keeps_parameters_whole_and_loses_none(parameters, n):
    loads = greedy_shards(parameters, n)
    assert sum(loads) == sum(parameters)
    assert max(loads) >= max(parameters, default=0)
    assert max(loads) <= sum(parameters) / n + max(parameters, default=0)


@given(st.lists(st.integers(0, 50), max_size=20), ranks, st.sampled_from([1, 2]))
def test_a_rank_touches_the_parameters_that_its_chunk_shares_an_element_with(parameters, n, step):
    owners = [e // max(even_shards(sum(parameters), n, step)) for e in range(sum(parameters))]
    parts = [{owners.pop(0) for _ in range(size)} for size in parameters]
    assert touched_shards(parameters, n, step) == tuple(
        sum(size for size, part in zip(parameters, parts, strict=True) if rank in part)
        for rank in range(n)
    )


def test_torch_chunk_leaves_trailing_ranks_empty():
    assert row_shards(9, 4) == (3, 3, 3, 0)
    assert even_shards(0, 3) == (0, 0, 0)


def test_activations_by_both_formulas():
    gpt3 = {"layers": 96, "hidden": 12288, "heads": 96, "sequence": 2048}
    sbh = 2048 * 12288
    assert activation_bytes(**gpt3) == 96 * sbh * 114
    assert activation_bytes(**gpt3, recompute="selective") == 96 * sbh * 34
    assert activation_bytes(**gpt3, recompute="full") == 96 * sbh * 2
    assert activation_bytes(**gpt3, formula="zero") == 96 * sbh * 24
    assert activation_bytes(**gpt3, tensor_parallel=8) == 96 * sbh * 23
    parallel = activation_bytes(**gpt3, tensor_parallel=8, sequence_parallel=True)
    assert parallel == 96 * sbh * 114 // 8
    assert activation_bytes(**gpt3, micro_batch=3) == 3 * activation_bytes(**gpt3)
    with pytest.raises(ValueError, match="Activation formula"):
        activation_bytes(**gpt3, formula="mine")


def test_activations_are_derived_from_what_a_layer_keeps():
    parts = {name for name, _ in derive_activations().steps[0].parts}
    assert parts == {"attention", "attention scores", "MLP", "layer norms"}
    one = {t: 1, L: 1}
    assert sp.expand(derive_activations().result.subs(one)) == 34 * s * b * h + 5 * a * s**2 * b
    assert sp.expand(derive_activations("selective").result.subs(one)) == 34 * s * b * h
    assert derive_activations("full").result == 2 * L * s * b * h
    assert derive_activations("none", "zero").result == 2 * (12 * L * s * b * h), "12 elements"
    with pytest.raises(ValueError, match="possible are none, full"):
        derive_activations("selective", "zero")


def test_fused_gradients_grow_with_the_model_unless_the_buffer_is_constant():
    assert [fused_buffer(n * 10**9).high for n in (1, 3)] == [4 * 10**9, 12 * 10**9]
    assert [fused_buffer(n * 10**9, True, 2).high for n in (1, 3)] == [10**9, 10**9]
    assert fused_buffer(1000, True, 2).high == 2000
    assert fused_buffer(10**9).low == 0


def test_number_formats():
    assert FP16.largest == 65504 and FP16.smallest == sp.Rational(1, 2**24)
    assert BF16.smallest_normal == FP32.smallest_normal == sp.Rational(1, 2**126)
    assert BF16.absorbs(sp.Rational(1, 2**9)) and not FP32.absorbs(sp.Rational(1, 2**9))
    assert BF16.absorbs(sp.Rational(1, 2**8)), "half a spacing rounds to even"
    assert not BF16.absorbs(sp.Rational(1, 2**7))


def test_loss_scaling_lifts_a_lost_gradient_to_a_normal_number():
    lost = derive_loss_scale(-30)
    assert lost.result == FP16.smallest_normal == sp.Rational(1, 2**14)
    assert "rounds to 0" in str(lost) and "bf16" in str(lost)
    assert derive_loss_scale(-10).result == sp.Rational(1, 2**10), "large enough as it is"
