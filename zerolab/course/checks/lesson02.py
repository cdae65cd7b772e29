"""Lesson 02: elements, bits and bytes, GB and GiB, K, and formulas that take numbers."""

from __future__ import annotations

import operator
from typing import Any

import sympy as sp

from zerolab.course.checks.core import Wrong, exercise, given_back, shown, type_of
from zerolab.course.checks.functions import FORMULAS, expect_function, same_plain, without
from zerolab.course.checks.numbers import Slip, expect_number
from zerolab.theory.derivation import difference
from zerolab.theory.memory import RECIPES, Recipe
from zerolab.theory.notation import N_d, Psi, plain


@exercise(
    "02.1",
    "Bytes of any elements",
    points=2,
    hints=[
        "Count bits first: how many do all elements have together?",
        "8 bits are a byte, and a part of a byte takes a whole one: round up, once, at the end.",
        "-(-a // b) is a / b rounded up, in whole numbers.",
    ],
)
def storage_bytes(answer: Any) -> None:
    cases = [(10, 16), (1000, 32), (7 * 10**9, 8), (4, 4), (3, 4), (9, 1), (0, 16)]
    expect_function(
        answer,
        lambda elements, bits: -(-elements * bits // 8),
        cases,
        [
            (lambda n, bits: n * bits, "These are bits: 8 of them are a byte."),
            (lambda n, bits: n * (bits // 8),
             "4-bit elements have half a byte each: bits // 8 makes that 0. Divide at the end."),
            (lambda n, bits: n * -(-bits // 8),
             "4-bit elements lie two in a byte: round up once at the end, not for each of them."),
            (lambda n, bits: n * bits // 8, "You round down: memory comes in whole bytes."),
            (lambda n, bits: round(n * bits / 8),
             "round() goes to the nearest: a part of a byte takes a whole one, so round up."),
            (lambda n, bits: n * 2, "An element has 2 bytes only where it has 16 bits."),
            (lambda n, bits: n, "These are elements: how many bits has each?"),
            (lambda n, bits: n * bits // 8 + 1,
             "You add a byte always: it is needed only where bits are left over."),
        ],
        lambda n, bits: f"{n:,} elements of {bits} bits",
        "Multiply, divide by 8, round up.",
        same=_same_int,
    )  # fmt: skip


def _same_int(got: Any, wanted: int) -> bool:
    if type(got) is bool or not hasattr(type(got), "__index__"):
        raise Wrong(
            f"You returned {shown(got)}.", "Return an int: bytes are whole, // stays whole."
        )
    return operator.index(got) == wanted


@exercise(
    "02.2",
    "What a tool prints",
    points=2,
    hints=[
        "A GiB is 2**30 bytes. How many of them are there in num_bytes?",
        'f"{value:.1f} GiB" writes one digit after the point.',
    ],
)
def as_a_tool_prints(answer: Any) -> None:
    gib, mixed = 2**30, 1000 * 1024**2
    expect_function(
        answer,
        lambda n: f"{n / gib:.1f} GiB",
        [(112 * 10**9,), (80 * 10**9,), (2**30,), (26_250_000_000,), (15 * 10**9,)],
        [
            (lambda n: f"{n / 1e9:.1f} GB", "That is right, in GB: the tool counts in GiB."),
            (lambda n: f"{n / gib:.1f} GB", "The number is in GiB: write the unit that it has."),
            (lambda n: f"{n / 1e9:.1f} GiB", "You divided by 1e9, which gives GB."),
            (lambda n: f"{n / 1e9 * gib / 1e9:.1f} GiB",
             "A GiB is larger than a GB: the number gets smaller, so divide."),
            (lambda n: f"{n / mixed:.1f} GiB", "You mixed 1000 and 1024: a GiB is 1024³ bytes."),
            (lambda n: f"{n / gib:.0f} GiB", "One digit after the point, please."),
            (lambda n: f"{n / gib:.2f} GiB", "One digit after the point, please: not two."),
            (lambda n: f"{n / 2**20:.1f} MiB", "That is right, in MiB: give GiB."),
            (lambda n: f"{n / 2**20:.1f} GiB", "You divided by 2**20, which gives MiB."),
            (lambda n: f"{n // gib:.1f} GiB", "// cuts off what stands after the point: use /."),
            (lambda n: n / gib, "The number is right: return it as a text, with its unit."),
            (lambda n: round(n / gib, 1), "That is right: return it as a text, with its unit."),
            (lambda n: f"{n / gib:.1f}", "The number is right: its unit is missing."),
            (lambda n: f"{n / gib:.1f}GiB", "A space stands between the number and its unit."),
            (lambda n: f"{n // gib} GiB", "One digit after the point, please."),
            (lambda n: f"{int(n / gib * 10) / 10} GiB", "You cut digits off: round."),
        ],
        lambda n: f"{n:,} bytes",
        'Divide by 2**30 and write "… GiB" with one digit after the point.',
        same=lambda got, wanted: same_plain(
            " ".join(got.split()) if type(got) is str else got, wanted
        ),
    )  # fmt: skip


def _sum(pieces: dict[str, int], *without: str) -> int:
    return sum(size for name, size in pieces.items() if name not in without)


@exercise(
    "02.3",
    "K of a recipe",
    points=2,
    hints=[
        "Two pieces are not the optimizer's: forward and backward work with them.",
        "K is everything but the working parameter and the gradient.",
    ],
)
def k_of(answer: Any) -> None:
    own = ("working parameter", "gradient")
    expect_function(
        lambda recipe: answer(_by_name(recipe)) if callable(answer) else answer,
        lambda recipe: recipe.K,
        [(recipe,) for recipe in RECIPES.values()],
        [
            (lambda r: r.total, "That is all of the parameter's bytes: two pieces are no states."),
            (lambda r: 12, "12 is K of adamw-mixed: other recipes have other pieces."),
            (lambda r: r.total - 4, "You take 4 bytes off: which two pieces are they? By name."),
            (lambda r: _sum(dict(r.components), *own, "master weight"),
             "You left the master weight out: K includes it."),
            (lambda r: sum(s for n, s in r.components if n not in own and "gradient" not in n),
             "An fp32 gradient that is kept beside the 16-bit one belongs to the optimizer."),
            (lambda r: _sum(dict(r.components), "working parameter"),
             "The gradient is not among the optimizer's states."),
            (lambda r: _sum(dict(r.components), "gradient"),
             "The working parameter is not among the optimizer's states."),
            (lambda r: sum(s for n, s in r.components if n in ("momentum", "variance")),
             "Those are the moments alone: what else does the optimizer keep?"),
            (lambda r: sum(list(_by_name(r).values())[2:]),
             "You left out the first two of the dict: go by their names."),
            (lambda r: len(r.optimizer), "You counted the pieces: add up their bytes."),
            (lambda r: sum(s for _, s in r.components if s == 4),
             "Not every piece of 4 bytes is the optimizer's, and not every state has 4 bytes."),
        ],
        lambda recipe: f"{recipe.name}, {_by_name(recipe)},",
        "Add up what the optimizer keeps.",
    )  # fmt: skip


def _by_name(recipe: Recipe) -> dict[str, int]:
    """A recipe's pieces in the order of their names, which says nothing about whose they are."""
    return dict(sorted(recipe.components))


HIDDEN = ((7 * 10**9, 8), (13 * 10**9, 64), (104_336, 4), (1000, 1), (1000, 7))


@exercise(
    "02.4",
    "A formula that takes numbers",
    points=3,
    hints=[
        "K bytes for each parameter; the parameters are divided over the ranks.",
        "recipe.K is a number; Psi and N_d are the symbols from zerolab.theory.notation.",
        "return recipe.K * Psi / N_d",
    ],
)
def optimizer_bytes(answer: Any) -> None:
    if not callable(answer):
        raise Wrong(f"This is {type_of(answer)}.", "Give the function itself: optimizer_bytes.")
    answer = without(answer, *FORMULAS)
    missteps = [
        (lambda r: r.K * Psi, "You did not divide: N_d ranks share them."),
        (lambda r: (r.total - r.K + r.K / N_d) * Psi, "Leave out parameters and gradients."),
        (lambda r: (4 + r.K / N_d) * Psi, "Leave out parameters and gradients."),
        (lambda r: sp.Integer(12) * Psi / N_d, "12 is K of adamw-mixed: take recipe.K."),
        (lambda r: r.total * Psi / N_d, "That divides parameters and gradients, too: stage 3."),
        (lambda r: sp.Integer(r.K) / N_d, "That is bytes for each parameter: there are Ψ."),
        (lambda r: r.K * Psi * N_d, "You multiplied by N_d: more ranks hold less each."),
        (lambda r: r.K * Psi * (N_d - 1) / N_d, "That is what the rank does not hold."),
        (lambda r: sp.floor(r.K * Psi / N_d), "Rounding is not asked: they are divided evenly."),
        (lambda r: sp.ceiling(r.K * Psi / N_d), "Rounding is not asked: they are divided evenly."),
        (lambda r: sp.Integer(r.K), "That is K alone: bytes for each parameter, on one rank."),
    ]
    found = {recipe.name: _read(answer(recipe)) for recipe in RECIPES.values()}
    for name, expr in found.items():
        recipe = RECIPES[name]
        right = recipe.K * Psi / N_d
        if difference(expr, right) != 0:
            psi, n = next((x for x in HIDDEN if _at(expr, *x) != _at(right, *x)), HIDDEN[0])
            otherwise = "Ψ parameters, K bytes for each, divided over N_d ranks."
            words = (w for wrong, w in missteps if _always(found, wrong))
            raise Wrong(
                f"{name}, Ψ = {psi:,}, N_d = {n}: your {plain(expr)} gives "
                f"{plain(_at(expr, psi, n))} bytes, and each rank holds {_at(right, psi, n)}.",
                next(words, otherwise),
            )


def _always(found: dict[str, sp.Expr], wrong: Any) -> bool:
    return all(difference(expr, wrong(RECIPES[name])) == 0 for name, expr in found.items())


def _at(expr: sp.Expr, psi: int, n: int) -> sp.Expr:
    return expr.subs({Psi: psi, N_d: n})


def _read(got: Any) -> sp.Expr:
    """A sympy expression in Ψ and N_d; Wrong for what only looks like one."""
    if isinstance(got, int) and not isinstance(got, bool):
        got = sp.Integer(got)
    if not isinstance(got, sp.Expr):
        raise Wrong(f"You returned {type_of(got)}.", "Return an expression in Psi and N_d.")
    if strange := strangers(got):
        alike = str(strange[0]) in ("Psi", "N_d")
        raise Wrong(
            f"Your expression has a symbol {plain(strange[0])} that is not the course's.",
            "It only has the same name. sympy tells symbols apart by their assumptions, too: "
            "import it from zerolab.theory.notation."
            if alike
            else "Only Psi and N_d may stand in it; K is a number here, recipe.K.",
        )
    if got.has(sp.Float):
        raise Wrong(f"{plain(got)} has a rounded number in it.", "Write 12 and not 12.0.")
    return got


def strangers(expr: sp.Expr) -> list[sp.Symbol]:
    """Symbols that are not the course's Ψ and N_d, or only claim to be."""
    known = [(type(s), s.name, s.assumptions0) for s in (Psi, N_d)]
    symbols = {id(s): s for s in sp.preorder_traversal(expr) if isinstance(s, sp.Symbol)}.values()
    found = [s for s in symbols if (type(s), s.name, s.assumptions0) not in known]
    return sorted(found, key=str)


@exercise(
    "02.5",
    "What the large-N form adds",
    points=1,
    hints=[
        "Exact: 7/8 of S. Large-N form: S. How much more is the second, measured by the first?",
        "1 / (7/8) is 8/7, which is 1 + 1/7.",
    ],
)
def overestimate(answer: Any) -> None:
    slips = [
        Slip(12.5, "12.5 is measured by the larger of the two: divide by the exact one."),
        Slip(1 / 8, "1/8 is measured by the larger of the two: divide by the exact one."),
        Slip(87.5, "87.5 % is the exact factor itself."),
        Slip(800 / 7, "That is the whole ratio in percent: how much is it above 100?"),
        Slip(8 / 7, "That is the ratio: how many percent is it above 1?"),
        Slip(1 / 7, "That is right as a fraction: give percent."),
        Slip(0, "They are equal only in the limit of many ranks."),
        Slip(100 / 9, "That is 1/9: the exact factor for 8 ranks is 7/8."),
    ]
    value = given_back(answer)
    value = value.rstrip("% ") if type(value) is str else value
    expect_number(value, 100 / 7, "How many percent too large, for 8 ranks", slips)
