"""The course's symbols and words, each defined once.

Symbols carry their assumptions, so that sympy may use them (a rank count is a positive integer).
The plain strings are shared with the rest of the package, where code moves tensors.
"""

from dataclasses import dataclass

import sympy as sp
from sympy.printing.latex import LatexPrinter
from sympy.printing.str import StrPrinter

KINDS = ("parameters", "gradients", "optimizer_states")
COMPONENTS = ("working parameter", "gradient", "master weight", "momentum", "variance")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
STAGES = (0, 1, 2, 3)
TIERS = ("gpu", "cpu", "nvme")


Psi, N_d, K, A, b, s, h, L, a, t, W, G = sp.symbols(
    "Psi N_d K A b s h L a t W G", positive=True, integer=True
)
S, B, alpha, c, m = sp.symbols("S B alpha c m", positive=True)


@dataclass(frozen=True)
class Entry:
    """One row of the notation table: a symbol, what it means, its unit."""

    symbol: sp.Symbol
    meaning: str
    unit: str


NOTATION = (
    Entry(Psi, "parameters of the model, each counted once", "parameters"),
    Entry(N_d, "data-parallel degree: ranks that share the work", "ranks"),
    Entry(K, "optimizer states per parameter, the fp32 master weight included", "bytes/parameter"),
    Entry(A, "micro-batches per optimizer step (gradient accumulation)", "micro-batches"),
    Entry(S, "size of the full buffer that a collective works on", "bytes"),
    Entry(B, "what one rank can send", "bytes/s"),
    Entry(alpha, "latency of one message", "s"),
    Entry(b, "sequences in a micro-batch, per rank", "sequences"),
    Entry(s, "tokens in a sequence", "tokens"),
    Entry(h, "hidden size", "elements"),
    Entry(L, "transformer layers", "layers"),
    Entry(a, "attention heads", "heads"),
    Entry(t, "tensor-parallel degree", "ranks"),
    Entry(W, "all ranks, where sharding is hybrid", "ranks"),
    Entry(G, "ranks that share one copy of the model, where sharding is hybrid", "ranks"),
    Entry(c, "time of computation", "s"),
    Entry(m, "time of communication", "s"),
)


class _PositiveFirst:
    """Makes a printer write W - G, where sympy's own order of terms has -G + W."""

    def _as_ordered_terms(self, expr: sp.Expr, order: str | None = None) -> list[sp.Expr]:
        terms: list[sp.Expr] = super()._as_ordered_terms(expr, order)  # type: ignore[misc]
        first = next((t for t in terms if not t.could_extract_minus_sign()), terms[0])
        return [first, *(t for t in terms if t is not first)]


class _Text(_PositiveFirst, StrPrinter): ...


class _Latex(_PositiveFirst, LatexPrinter): ...


def latex(expr: sp.Expr) -> str:
    """An expression in LaTeX, positive terms first."""
    return str(_Latex().doprint(expr))


def plain(expr: sp.Expr) -> str:
    """An expression as one line of text: 4*Psi + 12*Psi/N_d becomes 4*Ψ + 12*Ψ/N_d."""
    return str(_Text().doprint(expr)).replace("**", "^").replace("Psi", "Ψ").replace("alpha", "α")


@dataclass(frozen=True)
class NotationTable:
    """Rows of notation, readable in a notebook and in a terminal."""

    rows: tuple[Entry, ...] = NOTATION

    def _repr_markdown_(self) -> str:
        head = "| symbol | meaning | unit |\n|---|---|---|\n"
        return head + "\n".join(
            f"| ${sp.latex(r.symbol)}$ | {r.meaning} | {r.unit} |" for r in self.rows
        )

    def __repr__(self) -> str:
        return "\n".join(f"{plain(r.symbol):4} {r.meaning} [{r.unit}]" for r in self.rows)


def notation_table(*symbols: sp.Symbol) -> NotationTable:
    """The table of all symbols, or of those given, in the order of the course."""
    return NotationTable(tuple(r for r in NOTATION if not symbols or r.symbol in symbols))
