"""Bytes of model states that a rank holds, from a precision recipe and a stage.

Stage 0 is plain data parallelism; stage 1 shards optimizer states, stage 2 also gradients, stage 3
also parameters (ZeRO, arXiv 1910.02054, §5). All figures are bytes per rank, and model states only:
activations, gathered units, buffers and fragmentation are in `residual`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy as sp

from zerolab.theory.derivation import Derivation, quotient
from zerolab.theory.notation import KINDS, STAGES, K, N_d, Psi
from zerolab.theory.values import one_of, whole

ADAM = (("momentum", 4), ("variance", 4))
MASTER = ("master weight", 4)
TWO_GRADS = (MASTER, ("fp32 gradient", 4), *ADAM)


@dataclass(frozen=True)
class Recipe:
    """What exists for each parameter and how many bytes each piece takes.

    `gathered` and `reduced` are the bytes of one element while a parameter is gathered and while a
    gradient is reduced, where they differ from the stored ones. `offered` are the stages that the
    software behind the recipe has; the arithmetic holds at all four.
    """

    name: str
    parameter: int
    gradient: int
    optimizer: tuple[tuple[str, int], ...]
    source: str
    leaves_out: str = "activations, gathered units, buffers, fragmentation"
    gathered: int | None = None
    reduced: int | None = None
    offered: tuple[int, ...] = STAGES

    @property
    def K(self) -> int:
        """Bytes of optimizer states per parameter, the master weight included."""
        return sum(size for _, size in self.optimizer)

    @property
    def total(self) -> int:
        """Bytes per parameter where nothing is sharded."""
        return self.parameter + self.gradient + self.K

    @property
    def gather_bytes(self) -> int:
        return self.parameter if self.gathered is None else self.gathered

    @property
    def reduce_bytes(self) -> int:
        return self.gradient if self.reduced is None else self.reduced

    @property
    def components(self) -> tuple[tuple[str, int], ...]:
        """All that exists for a parameter, by name, with bytes."""
        return (("working parameter", self.parameter), ("gradient", self.gradient), *self.optimizer)

    def size(self, kind: str) -> int:
        """Bytes per parameter of one kind of state."""
        return dict(zip(KINDS, (self.parameter, self.gradient, self.K), strict=True))[kind]

    def sharded(self, stage: int) -> tuple[str, ...]:
        """Names of the components that a stage shards under this recipe."""
        states = tuple(name for name, _ in self.optimizer)
        kept = 3 - len(sharded_kinds(stage))
        return sum((("working parameter",), ("gradient",), states)[kept:], ())


_MEGATRON = "Megatron-LM README, distributed optimizer"
_RUN = "read off torch 2.13"
_ROWS = (
    Recipe("adamw-mixed", 2, 2, (MASTER, *ADAM), "ZeRO §3.1: fp16 with fp32 Adam"),
    Recipe("adamw-fp32", 4, 4, ADAM, _MEGATRON + ", fp32: 8 + 8/d"),
    Recipe("adamw-mixed-fp32-grads", 2, 4, (MASTER, *ADAM), _MEGATRON + ", bf16: 6 + 12/d",
           offered=(0, 1)),
    Recipe("adamw-fp16-two-grads", 2, 2, TWO_GRADS, _MEGATRON + ", fp16: 4 + 16/d", offered=(0, 1)),
    Recipe("zero-infinity", 2, 2, TWO_GRADS, "ZeRO-Infinity §3: 20 bytes", offered=(3,)),
    Recipe("deepspeed-estimator", 2, 2, TWO_GRADS, "DeepSpeed memory estimators since PR 5099",
           "activations, buffers; its stage 3 says 18/N and omits the 16-bit gradient"),
    Recipe("deepspeed-bf16-states", 2, 2, (("master weight", 2), ("momentum", 2), ("variance", 2)),
           "DeepSpeed config: bf16 master weights and optimizer states"),
    Recipe("deepspeed-bf16-master", 2, 2, (("master weight", 2), *ADAM),
           "DeepSpeed config: bf16 master weights, fp32 moments"),
    Recipe("fsdp2-mixed", 4, 4, ADAM, _RUN + ": fp32 shards, bf16 compute",
           "gathered units at 2 bytes an element, activations", gathered=2, reduced=2),
    Recipe("adamw-bf16", 2, 2, (("momentum", 2), ("variance", 2)), _RUN + ": no master weight"),
    Recipe("adamw-autocast", 4, 4, ADAM, "ml-engineering, bytes per parameter",
           "transient bf16 casts of weights, activations"),
    Recipe("adamw-8bit", 4, 4, (("momentum", 1), ("variance", 1)), "bitsandbytes AdamW8bit",
           "block scales; tensors below 4096 elements stay at 32 bits"),
    Recipe("sgd-momentum-mixed", 2, 2, (MASTER, ("momentum", 4)), "ZeRO §3.1 with one moment: K=8"),
    Recipe("sgd-momentum-fp32", 4, 4, (("momentum", 4),), _RUN + ": one fp32 buffer"),
    Recipe("adafactor", 4, 4, (), _RUN + ": row_var (n, 1), col_var (1, m)",
           "row and column variances, 4(n + m) bytes a matrix: adafactor_state_bytes"),
    Recipe("muon", 4, 4, (("momentum", 4),), _RUN + ": one momentum",
           "AdamW for what is not a matrix, activations"),
)  # fmt: skip
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ROWS}
DEFAULT_RECIPE = "adamw-mixed"


def recipe_named(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; ValueError with the nearest names where there is none."""
    return recipe if isinstance(recipe, Recipe) else RECIPES[one_of("Recipe", recipe, RECIPES)]


def adafactor_state_bytes(rows: int, columns: int) -> int:
    """fp32 row and column variances of one matrix, without momentum: 4(n + m) bytes."""
    return 4 * (whole("rows", rows, 1) + whole("columns", columns, 1))


def sharded_kinds(stage: int) -> tuple[str, ...]:
    """The kinds of state that a stage shards (ZeRO §5): the last `stage` of the three."""
    return KINDS[3 - one_of("Stage", stage, STAGES) :]


def held(stage: int, recipe: str | Recipe = DEFAULT_RECIPE) -> dict[str, sp.Expr]:
    """Bytes per rank of each kind, in Ψ and N_d; their sum is 4Ψ + 12Ψ/N_d at stage 1."""
    r, kinds = recipe_named(recipe), sharded_kinds(stage)
    return {kind: r.size(kind) * Psi / (N_d if kind in kinds else 1) for kind in KINDS}


def padding(params_or_units: float | Sequence[int], ranks: int) -> int:
    """Elements added so that every unit of u becomes N·ceil(u/N) elements."""
    n = whole("ranks", ranks, 1)
    sizes = [params_or_units] if isinstance(params_or_units, int | float) else params_or_units
    return sum(-whole("a unit's size", size) % n for size in sizes)


def padded_params(params: float, units: Sequence[int] | None, ranks: int) -> int:
    """All elements with padding, one flat unit where `units` is None."""
    total = whole("params", params, 1)
    if units is not None and sum(units) != total:
        raise ValueError(f"The units hold {sum(units)} parameters together, and must hold {total}.")
    return total + padding(total if units is None else units, ranks)


def held_bytes(
    stage: int, ranks: int, params: float, recipe: str | Recipe = DEFAULT_RECIPE,
    units: Sequence[int] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Exact bytes that each rank holds, by kind and in total, padding included.

    Every unit is padded to a multiple of `ranks`, at every stage; `units=None` is one flat unit.
    """
    r, kinds, n = recipe_named(recipe), sharded_kinds(stage), whole("ranks", ranks, 1)
    padded = padded_params(params, units, n)
    sizes = {kind: r.size(kind) * padded // (n if kind in kinds else 1) for kind in KINDS}
    return {**sizes, "total": sum(sizes.values())}


def derive_16psi(recipe: str | Recipe = DEFAULT_RECIPE) -> Derivation:
    """What a rank of plain data parallelism holds, from the pieces of a parameter (ZeRO §3.1)."""
    r = recipe_named(recipe)
    pieces = {name: size * Psi for name, size in r.components}
    kinds = {"parameters": r.parameter * Psi, "gradients": r.gradient * Psi,
             f"optimizer states, K = {r.K}": r.K * Psi}  # fmt: skip
    title, why = f"Model states without sharding, {r.name}", f"what each parameter has ({r.source})"
    start = Derivation(title, pieces, why, unit="bytes per rank", of="M_0")
    step = start.then(kinds, "grouped by kind; K counts the master weight where there is one")
    return step.then(r.total * Psi, "added up; the number of ranks does not occur")


def derive_k() -> Derivation:
    """The general form in K, with the lecture's K = 12."""
    parts = {"parameters": 2 * Psi, "gradients": 2 * Psi, "optimizer states": K * Psi}
    start = Derivation("Model states in terms of K", parts, "16-bit parameters and gradients")
    why = "AdamW keeps a master weight, a momentum and a variance in fp32: 4+4+4"
    return start.then((4 + K) * Psi, "Ψ taken out").substitute({K: sp.Integer(12)}, why)


def derive_stage(stage: int, recipe: str | Recipe = DEFAULT_RECIPE) -> Derivation:
    """What a rank holds at a stage, from its kinds of state (ZeRO §5.1 to §5.3)."""
    r, kinds = recipe_named(recipe), sharded_kinds(stage)
    words = ", ".join(kind.replace("_", " ") for kind in kinds)
    parts = {kind.replace("_", " "): expr for kind, expr in held(stage, r).items()}
    shared = sum(r.size(kind) for kind in kinds)
    kept = r.total - shared
    why = f"{words} divided over N_d ranks, the rest whole" if kinds else "nothing is sharded"
    title = f"Model states at stage {stage}, {r.name}"
    start = Derivation(title, parts, why, unit="bytes per rank", of=f"M_{stage}")
    why = f"whole on every rank: {kept} bytes a parameter; sharded: {shared}"
    return start.then(kept * Psi + shared * Psi / N_d, why)


def derive_limit(stage: int, recipe: str | Recipe = DEFAULT_RECIPE) -> Derivation:
    """How many times less a rank holds at a stage, and the limit for many ranks (ZeRO §1)."""
    r = recipe_named(recipe)
    kept = r.total - sum(r.size(kind) for kind in sharded_kinds(stage))
    ratio = quotient(r.total * Psi, sum(held(stage, r).values()))
    title = f"Reduction of model states at stage {stage}, {r.name}"
    start = Derivation(title, ratio, "unsharded over sharded", unit="times", of=f"R_{stage}")
    if kept == 0:
        return start.then(N_d, "everything is sharded: the reduction is the number of ranks itself")
    step = start.then(sp.cancel(ratio), "Ψ cancels: the size of the model does not matter")
    return step.limit(N_d, sp.oo, f"with many ranks only the whole part remains: {r.total}/{kept}")
