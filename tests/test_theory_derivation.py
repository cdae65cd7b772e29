"""A derivation cannot hold a step that does not follow; notation is defined once."""

import subprocess
import sys

import pytest
import sympy as sp

from zerolab.theory import (
    Derivation,
    derive_16psi,
    derive_hybrid,
    derive_limit,
    derive_ratio,
    derive_ring,
    derive_stage,
    notation_table,
)
from zerolab.theory.derivation import difference
from zerolab.theory.layouts import layout
from zerolab.theory.notation import NOTATION, G, K, N_d, Psi, W, c, latex, m, plain


def test_a_wrong_step_is_refused_with_the_difference():
    start = Derivation("Sum", {"a": 2 * Psi, "b": 2 * Psi}, "two parts")
    with pytest.raises(ValueError, match=r"5\*Ψ exceeds 4\*Ψ by Ψ"):
        start.then(5 * Psi, "wrong")
    with pytest.raises(ValueError, match="not equal"):
        start.then({"a": 2 * Psi, "b": 3 * Psi}, "wrong parts")
    assert start.then(4 * Psi, "right").result == 4 * Psi


def test_a_wrong_bound_is_refused():
    start = Derivation("Overlap", (c + m) / sp.Max(c, m), "one after the other over side by side")
    with pytest.raises(ValueError, match="not a bound"):
        start.at_most(sp.Rational(3, 2), "too tight")
    assert start.at_most(2, "the shorter is at most the longer").result == 2


def test_max_and_min_are_decided_exactly():
    assert difference(c + m, sp.Max(c, m) + sp.Min(c, m)) == 0
    assert difference(c, sp.Max(c, m)) != 0


def test_substitution_and_limit_are_computed():
    start = Derivation("Ratio", 16 / (4 + 12 / N_d), "of two")
    assert start.substitute({N_d: 8}, "eight ranks").result == sp.Rational(32, 11)
    assert start.limit(N_d, sp.oo, "many").result == 4
    with pytest.raises(ValueError, match="has no K"):
        start.substitute({K: 12}, "no K here")


def test_extending_a_derivation_leaves_it_as_it_was():
    start = Derivation("One", Psi + Psi, "twice")
    start.then(2 * Psi, "added")
    assert len(start.steps) == 1


def test_rendering_shows_every_line_and_reason():
    derivation = derive_stage(1)
    shown, text = derivation._repr_markdown_(), str(derivation)
    assert r"\underbrace{2 \Psi}_{\text{parameters}}" in shown
    assert shown.count("$$") == 2 and r"\begin{aligned}" in shown
    for step in derivation.steps:
        assert step.reason in shown and step.reason in text
    assert "4*Ψ + 12*Ψ/N_d" in text
    assert str(derivation) == str(derive_stage(1)), "the same text every time"
    assert r"optimizer states, K = 12" in derive_16psi().latex()


def test_a_difference_is_written_with_its_positive_term_first():
    assert plain(W - G) == "W - G" and latex(1 - G / W) == r"1 - \frac{G}{W}"
    assert plain(-G - W) == "-G - W" and plain(2 * W - 1) == "2*W - 1"
    assert plain(Psi + W - G) == "Ψ - G + W", "the other terms stay where sympy has them"


def test_the_ring_and_the_hybrid_show_where_their_formulas_come_from():
    first, last = str(derive_ring("all_gather")).splitlines()[1:]
    assert "(S/N_d)*(N_d - 1) " in first and "S*(N_d - 1)/N_d " in last
    first, last = str(derive_hybrid()).splitlines()[1:]
    assert "2*(Ψ/G)*(1 - G/W) " in first and "2*Ψ*(W - G)/(G*W) " in last
    assert "4*Ψ*(N_d - G)/(G*N_d)" in plain(layout("HYBRID_SHARD").sent())


def test_a_quotient_of_fractions_is_shown_as_one_over_the_other():
    shown = derive_limit(3).latex()
    assert r"\frac{16 \Psi}{\dfrac{16 \Psi}{N_{d}}}" in shown
    above = r"\dfrac{6 \Psi \left(N_{d} - 1\right)}{N_{d}}"
    assert rf"\frac{{{above}}}{{{above.replace('6', '4')}}}" in derive_ratio(3).latex()
    assert r"\frac{16 \Psi}{4 \Psi + \frac{12 \Psi}{N_{d}}}" in derive_limit(1).latex()


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_a_step_that_regroups_shows_two_different_lines(collective):
    first, second = (step.latex() for step in derive_ring(collective).steps)
    assert first != second


def test_symbols_are_positive_integers_with_meaning_and_unit():
    assert all(entry.symbol.is_positive and entry.meaning and entry.unit for entry in NOTATION)
    assert Psi.is_integer and N_d.is_integer and K.is_integer
    assert len({entry.symbol for entry in NOTATION}) == len(NOTATION)
    table = notation_table(Psi, N_d)
    assert "| $\\Psi$ |" in table._repr_markdown_() and repr(table).count("\n") == 1
    assert plain(Psi**2) == "Ψ^2"


def test_theory_loads_sympy_and_nothing_heavier():
    code = (
        "import sys; before = set(sys.modules); import zerolab.theory;"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names);"
        "print(*{m.split('.')[1] for m in sys.modules if m.startswith('zerolab.')})"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    others, parts = run.stdout.splitlines()
    assert set(others.split()) == {"zerolab", "sympy", "mpmath"}
    assert set(parts.split()) == {"theory"}
