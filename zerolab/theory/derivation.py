"""A derivation: steps with reasons, none of which can be wrong.

Every step is checked when it is added. Equal steps must differ by zero, a bound must hold for
every value that the symbols may take; substitutions and limits are computed, not claimed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy as sp

from zerolab.theory.notation import latex, plain

Parts: TypeAlias = Mapping[str, sp.Expr | int]
Value: TypeAlias = sp.Expr | int | Parts


@dataclass(frozen=True)
class Step:
    """One line: the expression, why it follows, and how it is tied to the line before."""

    expr: sp.Expr
    reason: str
    relation: str = "="  # in plain text
    relation_latex: str = "="
    parts: tuple[tuple[str, sp.Expr], ...] = ()

    def text(self) -> str:
        shown = [f"{plain(expr)} ({name})" for name, expr in self.parts]
        return " + ".join(shown) or plain(self.expr)

    def latex(self) -> str:
        brace, pairs = r"\underbrace{%s}_{\text{%s}}", self.parts
        shown = [brace % (_latex(expr), name.replace("_", r"\_")) for name, expr in pairs]
        return " + ".join(shown) or _latex(self.expr)


def _latex(expr: sp.Expr) -> str:
    """sympy's LaTeX; a quotient of two fractions as one over the other, not torn into factors."""
    top, low = expr.args if expr.is_Mul and len(expr.args) == 2 else (expr, sp.Integer(1))
    if low.is_Pow and low.exp == -1 and sp.fraction(low.base)[1] != 1:
        above, below = (latex(x).replace(r"\frac", r"\dfrac") for x in (top, low.base))
        return rf"\frac{{{above}}}{{{below}}}"
    return latex(expr)


def _read(value: Value) -> tuple[sp.Expr, tuple[tuple[str, sp.Expr], ...]]:
    if isinstance(value, Mapping):
        parts = tuple((name, sp.sympify(expr)) for name, expr in value.items())
        return sp.Add(*(expr for _, expr in parts)), parts
    return sp.sympify(value), ()


def difference(left: sp.Expr, right: sp.Expr) -> sp.Expr:
    """left - right over one denominator; zero exactly when two rational expressions are equal.

    Max and Min are first written with absolute values: Max(c, m) = (c + m + |c - m|)/2.
    """
    return sp.cancel(sp.together((left - right).rewrite(sp.Abs)))


def quotient(top: sp.Expr | int, low: sp.Expr | int) -> sp.Expr:
    """top over low as it is written, before anything cancels."""
    return sp.Mul(top, sp.Pow(low, -1, evaluate=False), evaluate=False)


class Derivation:
    """A titled chain of checked steps; `then`, `substitute`, `limit` and `at_most` extend it.

    Each of them returns a new derivation. A value is an expression, or a mapping from names to
    addends, which is shown as a sum of named parts. ValueError when a step does not follow.

    >>> Derivation("Twice", {"one": 1, "other": 1}, "two parts").then(2, "added").result
    2
    """

    def __init__(self, title: str, start: Value, reason: str, *, unit: str = "", of: str = ""):
        expr, parts = _read(start)
        self.title, self.unit, self.of = title, unit, of
        self.steps: tuple[Step, ...] = (Step(expr, reason, parts=parts),)

    @property
    def result(self) -> sp.Expr:
        """The last line's expression."""
        return self.steps[-1].expr

    def _with(self, step: Step) -> "Derivation":
        longer = Derivation(self.title, 0, "", unit=self.unit, of=self.of)
        longer.steps = (*self.steps, step)
        return longer

    def then(self, value: Value, reason: str) -> "Derivation":
        """The same quantity in another form."""
        expr, parts = _read(value)
        gap = difference(expr, self.result)
        if gap != 0:
            claim = f"{plain(expr)} exceeds {plain(self.result)} by {plain(gap)}"
            raise ValueError(f"A step of '{self.title}' is not equal to the one before: {claim}.")
        return self._with(Step(expr, reason, parts=parts))

    def substitute(self, values: Mapping[sp.Symbol, sp.Expr | int], reason: str) -> "Derivation":
        """The expression where symbols take these values."""
        missing = [k for k in values if k not in self.result.free_symbols]
        if missing:
            raise ValueError(f"{plain(self.result)} has no {plain(missing[0])} to substitute.")
        text = ", ".join(f"{plain(k)} = {plain(sp.sympify(v))}" for k, v in values.items())
        latex = ",\\ ".join(f"{sp.latex(k)} = {sp.latex(v)}" for k, v in values.items())
        expr = self.result.subs(values, simultaneous=True)
        return self._with(Step(expr, reason, f"-> [{text}]", rf"\xrightarrow{{{latex}}}"))

    def limit(self, symbol: sp.Symbol, to: sp.Expr | int, reason: str) -> "Derivation":
        """What the expression tends to as `symbol` goes to `to` (sympy.oo for many)."""
        expr = sp.limit(self.result, symbol, to)
        text, latex = f"{plain(symbol)} -> {to}", rf"{sp.latex(symbol)} \to {sp.latex(to)}"
        return self._with(Step(expr, reason, f"-> [{text}]", rf"\xrightarrow{{{latex}}}"))

    def at_most(self, bound: sp.Expr | int, reason: str) -> "Derivation":
        """An upper bound, for every value of the symbols."""
        expr = sp.sympify(bound)
        gap = difference(expr, self.result)
        if not gap.is_nonnegative:
            claim = f"{plain(expr)} - ({plain(self.result)}) = {plain(gap)} may be negative"
            raise ValueError(f"A step of '{self.title}' is not a bound: {claim}.")
        return self._with(Step(expr, reason, "<=", r"\le"))

    def __str__(self) -> str:
        lines = [self.title + (f" [{self.unit}]" if self.unit else "")]
        for number, step in enumerate(self.steps, 1):
            relation = (self.of + " =" if self.of else "") if number == 1 else step.relation
            lines.append(f"  ({number}) {f'{relation} {step.text()}'.strip()}    | {step.reason}")
        return "\n".join(lines)

    __repr__ = __str__

    def latex(self) -> str:
        """An aligned block with numbered lines, without delimiters."""
        lefts = [rf"{self.of} & {'=' if self.of else ''}"]
        lefts += [f"& {step.relation_latex}" for step in self.steps[1:]]
        pairs = enumerate(zip(lefts, self.steps, strict=True), 1)
        rows = [rf"{left} {step.latex()} && \text{{({n})}}" for n, (left, step) in pairs]
        return "\\begin{aligned}\n" + " \\\\\n".join(rows) + "\n\\end{aligned}"

    def _repr_markdown_(self) -> str:
        head = f"**{self.title}**" + (f" ({self.unit})" if self.unit else "")
        reasons = "\n".join(f"{n}. {step.reason}" for n, step in enumerate(self.steps, 1))
        return f"{head}\n\n$$\n{self.latex()}\n$$\n\n{reasons}\n"
