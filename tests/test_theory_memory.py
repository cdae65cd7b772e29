"""Bytes held: the recipe's sums, the stages, padding, and the tables of the ZeRO paper."""

from fractions import Fraction

import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.theory import (
    COMPONENTS,
    KINDS,
    RECIPES,
    STAGES,
    derive_16psi,
    derive_k,
    derive_limit,
    derive_stage,
    held,
    held_bytes,
    padding,
)
from zerolab.theory.memory import adafactor_state_bytes, sharded_kinds
from zerolab.theory.notation import N_d, Psi

recipes = st.sampled_from(sorted(RECIPES))
stages = st.sampled_from(STAGES)
ranks = st.integers(1, 3000)
unit_lists = st.lists(st.integers(0, 10**7), min_size=1, max_size=6).filter(lambda u: sum(u) > 0)

# ZeRO Table 1: rows by data-parallel degree; (7.5B, 128B, 1T) at stages 1, 2, 3, as printed
TABLE_1 = {
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}


def as_printed(num_bytes: int, printed: str) -> str:
    """GB to the printed number of digits: decimals round half up, whole numbers are cut off."""
    digits = len(printed.partition(".")[2])
    scaled = Fraction(num_bytes * 10**digits, 10**9)
    value = scaled.__floor__() if digits == 0 else (scaled + Fraction(1, 2)).__floor__()
    return f"{value / 10**digits:.{digits}f}"


@pytest.mark.parametrize("ranks_", TABLE_1)
def test_zero_table_1_to_its_printed_digits(ranks_):
    for params, cells in zip((7.5e9, 128e9, 1e12), TABLE_1[ranks_], strict=True):
        for stage, printed in zip((1, 2, 3), cells.split(), strict=True):
            ours = held_bytes(stage, ranks_, params)["total"]
            assert as_printed(ours, printed) == printed, (params, stage)


def test_zero_table_1_without_sharding():
    assert [held_bytes(0, 1, p)["total"] for p in (7.5e9, 128e9, 1e12)] == [
        120 * 10**9, 2048 * 10**9, 16000 * 10**9,
    ]  # fmt: skip


def test_zero_figure_1():
    figure = [held_bytes(stage, 64, 7.5e9)["total"] for stage in STAGES]
    assert [as_printed(n, "1.0") for n in figure] == ["120.0", "31.4", "16.6", "1.9"]


def test_the_four_stages_in_symbols():
    expected = (16 * Psi, 4 * Psi + 12 * Psi / N_d, 2 * Psi + 14 * Psi / N_d, 16 * Psi / N_d)
    for stage, total in zip(STAGES, expected, strict=True):
        assert sp.expand(sum(held(stage).values()) - total) == 0
        assert sp.expand(derive_stage(stage).result - total) == 0


def test_reductions_tend_to_4_and_8_and_stage_3_to_the_number_of_ranks():
    assert [derive_limit(stage).result for stage in STAGES] == [1, 4, 8, N_d]
    assert derive_limit(1).steps[1].expr.subs(N_d, 8) == sp.Rational(32, 11)  # 2.909


def test_16_psi_and_k():
    assert derive_16psi().result == 16 * Psi
    assert derive_k().result == 16 * Psi
    assert RECIPES["adamw-mixed"].K == 12
    assert [n for n, _ in RECIPES["adamw-mixed"].components] == list(COMPONENTS)


@pytest.mark.parametrize(
    ("recipe", "total", "k", "stage_1"),
    [
        ("adamw-mixed", 16, 12, 4 * Psi + 12 * Psi / N_d),
        ("adamw-fp16-two-grads", 20, 16, 4 * Psi + 16 * Psi / N_d),
        ("adamw-mixed-fp32-grads", 18, 12, 6 * Psi + 12 * Psi / N_d),
        ("adamw-fp32", 16, 8, 8 * Psi + 8 * Psi / N_d),
        ("zero-infinity", 20, 16, None),
        ("fsdp2-mixed", 16, 8, None),
        ("adamw-bf16", 8, 4, None),
        ("deepspeed-bf16-states", 10, 6, None),
        ("deepspeed-bf16-master", 14, 10, None),
        ("adamw-8bit", 10, 2, None),
        ("sgd-momentum-mixed", 12, 8, None),
        ("sgd-momentum-fp32", 12, 4, None),
        ("muon", 12, 4, None),
        ("adafactor", 8, 0, None),
    ],
)
def test_published_bytes_per_parameter(recipe, total, k, stage_1):
    r = RECIPES[recipe]
    assert (r.total, r.K) == (total, k)
    assert derive_16psi(r).result == total * Psi
    if stage_1 is not None:
        assert sp.expand(sum(held(1, recipe).values()) - stage_1) == 0


def test_every_recipe_names_its_source_and_what_it_leaves_out():
    assert len(RECIPES) >= 12
    for name, recipe in RECIPES.items():
        assert recipe.name == name and recipe.source and recipe.leaves_out and recipe.offered
        assert recipe.sharded(0) == ()
        assert len(recipe.sharded(3)) == len(recipe.components)


def test_adafactor_keeps_a_row_and_a_column():
    assert adafactor_state_bytes(1000, 300) == 5200


@given(stages, ranks, recipes, unit_lists)
@settings(max_examples=200, deadline=None)
def test_shards_over_all_ranks_are_the_unsharded_state(stage, n, recipe, units):
    held_now = held_bytes(stage, n, sum(units), recipe, units)
    whole = held_bytes(0, n, sum(units), recipe, units)
    for kind in KINDS:
        copies = n if kind in sharded_kinds(stage) else 1
        assert held_now[kind] * copies == whole[kind]
    assert held_now["total"] == sum(held_now[kind] for kind in KINDS)


@given(stages, recipes)
def test_conservation_in_symbols(stage, recipe):
    shown, whole = held(stage, recipe), held(0, recipe)
    for kind in KINDS:
        assert shown[kind] * (N_d if kind in sharded_kinds(stage) else 1) == whole[kind]


@given(ranks, recipes, unit_lists)
def test_padding_is_the_only_difference_from_the_formula(n, recipe, units):
    pads = padding(units, n)
    assert 0 <= pads <= len(units) * (n - 1)
    assert (sum(units) + pads) % n == 0
    total = held_bytes(0, n, sum(units), recipe, units)["total"]
    assert total == RECIPES[recipe].total * (sum(units) + pads)


@given(st.integers(1, 10**6), st.integers(1, 3000), recipes)
def test_a_higher_stage_never_holds_more(k, n, recipe):
    totals = [held_bytes(stage, n, k * n, recipe)["total"] for stage in STAGES]
    assert totals == sorted(totals, reverse=True)


@given(st.integers(1, 10**9), st.integers(1, 1000), st.integers(2, 5))
def test_more_ranks_never_hold_more_where_nothing_is_padded(k, n, factor):
    params = k * n * factor
    for stage in STAGES:
        more, fewer = (held_bytes(stage, r, params)["total"] for r in (n * factor, n))
        assert more <= fewer


def test_one_flat_unit_is_the_default_and_units_pad_one_by_one():
    assert held_bytes(3, 4, 10)["parameters"] == 2 * 3
    assert held_bytes(3, 4, 10, units=[5, 5])["parameters"] == 2 * 4
    assert held_bytes(0, 4, 10)["total"] == 16 * 12
    assert padding(10, 4) == 2 and padding([5, 5], 4) == 6 and padding(1, 1) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: held_bytes(1, 0, 10), "ranks must be a whole number of at least 1"),
        (lambda: held_bytes(1, 4, -3), "params must be a whole number of at least 1"),
        (lambda: held_bytes(1, 4, 0.5), "params must be a whole number"),
        (lambda: held_bytes(1, 4, 7.5), "params must be a whole number"),
        (lambda: held_bytes(1, 4, "7"), "params must be a whole number"),
        (lambda: held_bytes(1, 4, float("nan")), "params must be a whole number"),
        (lambda: held_bytes(1, True, 5), "ranks must be a whole number"),
        (lambda: held_bytes(4, 4, 10), "possible are 0, 1, 2, 3"),
        (lambda: held_bytes(1, 4, 10, "adamw-mix"), "the nearest are adamw-mixed"),
        (lambda: held_bytes(1, 4, 10, units=[5, 4]), "must hold 10"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")
