"""The checks of lesson 02: stub, solution, and near misses with their words."""

import math

import pytest
import sympy as sp
from test_checks_04 import expect, stub

from zerolab.theory import held
from zerolab.theory.notation import N_d, Psi

GIB = 2**30


@pytest.mark.parametrize("number", ["02.1", "02.2", "02.3", "02.4", "02.5"])
@pytest.mark.parametrize("answer", [stub, None, ...])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


def test_02_1_passes():
    expect("02.1", lambda n, bits: -(-n * bits // 8), 2, "passed")
    expect("02.1", lambda n, bits: math.ceil(n * bits / 8), 2, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n, bits: n * bits, "These are bits"),
        (lambda n, bits: n * bits // 8, "round down"),
        (lambda n, bits: n * (bits // 8), "half a byte"),
        (lambda n, bits: n * max(1, bits // 8), "two in a byte"),
        (lambda n, bits: round(n * bits / 8), "to the nearest"),
        (lambda n, bits: n * 2, "only where it has 16 bits"),
        (lambda n, bits: n, "how many bits has each"),
        (lambda n, bits: n * bits // 8 + 1, "a byte always"),
        (lambda n, bits: n * bits / 8, "Return an int"),
        (lambda n, bits: n * bits // 8 * 3, "Multiply, divide"),
        (lambda n, bits: n // (bits - 1), "10 elements"),
        (lambda n: n, "could not be tried: TypeError"),
        (20, "Give the function itself"),
    ],
)
def test_02_1_near_misses_are_named(answer, words):
    expect("02.1", answer, 0, words)


def test_02_2_passes():
    expect("02.2", lambda n: f"{n / GIB:.1f} GiB", 2, "passed")
    expect("02.2", lambda n: f" {round(n / 1024**3, 1)}  GiB", 2, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n: f"{n / 1e9:.1f} GB", "counts in GiB"),
        (lambda n: f"{n / GIB:.1f} GB", "the unit that it has"),
        (lambda n: f"{n / 1e9:.1f} GiB", "which gives GB"),
        (lambda n: f"{n / 1e9 * GIB / 1e9:.1f} GiB", "so divide"),
        (lambda n: f"{n / 1000 / 1024**2:.1f} GiB", "mixed 1000 and 1024"),
        (lambda n: f"{n / GIB:.0f} GiB", "One digit"),
        (lambda n: f"{n / GIB:.2f} GiB", "not two"),
        (lambda n: f"{n / 2**20:.1f} MiB", "in MiB"),
        (lambda n: n / GIB, "as a text"),
        (lambda n: "104.3 GiB", "For 80,000,000,000 bytes"),
        (lambda n: f"{n / 2**20:.1f} GiB", "which gives MiB"),
        (lambda n: f"{n // GIB:.1f} GiB", "cuts off"),
        (lambda n: None, "print shows a value"),
    ],
)
def test_02_2_near_misses_are_named(answer, words):
    expect("02.2", answer, 0, words)


def k_of(pieces):
    return sum(pieces.values()) - pieces["working parameter"] - pieces["gradient"]


def test_02_3_passes():
    expect("02.3", k_of, 2, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p: sum(p.values()), "all of the parameter's bytes"),
        (lambda p: 12, "other recipes"),
        (lambda p: k_of(p) - p.get("master weight", 0), "K includes it"),
        (lambda p: sum(s for n, s in p.items() if "gradient" not in n and "working" not in n),
         "beside the 16-bit one"),
        (lambda p: sum(p.values()) - p["working parameter"], "The gradient is not"),
        (lambda p: sum(p.values()) - p["gradient"], "The working parameter is not"),
        (lambda p: sum(p.values()) - 4, "which two pieces"),
        (lambda p: print(end=""), "print shows a value"),
        (lambda p: len(p) - 2, "add up their bytes"),
        (lambda p: sum(s for s in p.values() if s == 4), "Not every piece of 4 bytes"),
        (lambda p: 4, "what the optimizer keeps"),
        (lambda p: p["master weight"] + p["momentum"] + p["variance"], "code stopped: KeyError"),
        (12, "you return 12"),
    ],
)  # fmt: skip
def test_02_3_near_misses_are_named(answer, words):
    expect("02.3", answer, 0, words)


def test_02_4_passes_in_any_form():
    expect("02.4", lambda r: r.K * Psi / N_d, 3, "passed")
    expect("02.4", lambda r: Psi * (r.total - r.parameter - r.gradient) / N_d, 3, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda r: r.K * Psi, "did not divide"),
        (lambda r: 12 * Psi / N_d, "take recipe.K"),
        (lambda r: r.total * Psi / N_d, "stage 3"),
        (lambda r: sp.Integer(r.K) / N_d, "there are Ψ"),
        (lambda r: 4 * Psi + r.K * Psi / N_d, "Leave out parameters"),
        (lambda r: (r.parameter + r.gradient) * Psi + r.K * Psi / N_d, "Leave out parameters"),
        (lambda r: held(1, r)["optimizer_states"], "the package's own"),
        (lambda r: r.K * Psi * N_d, "more ranks hold less"),
        (lambda r: r.K * Psi * (N_d - 1) / N_d, "does not hold"),
        (lambda r: r.K, "K alone"),
        (lambda r: r.K * sp.Symbol("Psi") / N_d, "only has the same name"),
        (lambda r: sp.Symbol("K") * Psi / N_d, "recipe.K"),
        (lambda r: float(r.K) * Psi / N_d, "rounded number"),
        (lambda r: r.K * Psi / (N_d + 1), "divided over N_d ranks"),
        (lambda r: "12 Psi", "Return an expression"),
        (lambda r: r.k * Psi, "AttributeError"),
        (12 * Psi / N_d, "Give the function itself"),
    ],
)
def test_02_4_near_misses_are_named(answer, words):
    expect("02.4", answer, 0, words)


def test_02_5_number_and_near_misses():
    expect("02.5", lambda: 100 / 7, 1, "passed")
    for wrong, words in [(12.5, "the larger of the two"), (87.5, "factor itself"),
                         (114.3, "above 100"), (8 / 7, "above 1?"), ("1/7", "give percent"),
                         (0, "in the limit"), (11.11, "7/8"), (0.125, "the larger of the two"),
                         (14, "rounded too coarsely"), (50, "with its units")]:  # fmt: skip
        expect("02.5", lambda wrong=wrong: wrong, 0, words)
