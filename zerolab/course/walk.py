"""A training step of each stage, moment by moment: what every rank holds, sends and frees.

Derived from the rules of ZeRO (arXiv 1910.02054, §5 and §7) for one micro-batch, element by
element. tests/test_walk.py holds it against real ranks, collective by collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zerolab.theory.memory import DEFAULT_RECIPE, Recipe, recipe_named, sharded_kinds
from zerolab.theory.notation import KINDS
from zerolab.theory.values import whole

Range = tuple[int, int]


@dataclass(frozen=True)
class Unit:
    """Parameters that are flattened together, and gathered and freed together: (name, elements)."""

    name: str
    parameters: tuple[tuple[str, int], ...]

    @property
    def numel(self) -> int:
        return sum(size for _, size in self.parameters)


TOY = (
    Unit("embedding", (("table", 7),)),
    Unit("layer", (("weight", 4), ("bias", 2))),
    Unit("head", (("weight", 5),)),
)
"""A model small enough to see each element; of 18 elements and units of 7, 6 and 5."""


@dataclass(frozen=True)
class Part:
    """One flat buffer on every rank: `kind` of unit number `unit`, whole or this rank's shard."""

    kind: str
    unit: int
    whole: bool


@dataclass(frozen=True)
class Moment:
    """What has just happened, and what every rank holds after it.

    `collective` is "" where nothing is sent; else `sent_bytes` is what each rank sends and
    `carries` the buffer that travels.
    """

    name: str
    held: frozenset[Part]
    freed: frozenset[Part] = frozenset()
    collective: str = ""
    carries: Part | None = None
    sent_bytes: int = 0


@dataclass(frozen=True)
class Walk:
    """A step of a stage on some ranks: its moments in order, and where each unit's buffer lies."""

    stage: int
    ranks: int
    recipe: Recipe
    units: tuple[Unit, ...]
    padded: tuple[int, ...]  # elements of each unit, a multiple of the ranks
    moments: tuple[Moment, ...]

    def parameters(self) -> list[tuple[str, int, int]]:
        """(name, start, stop) of each parameter; the name of padding is ""."""
        found: list[tuple[str, int, int]] = []
        for unit, start, length in zip(self.units, self._starts(), self.padded, strict=True):
            at, short = start, len(unit.parameters) == 1
            for name, size in unit.parameters:
                label = unit.name if short else name
                found.append((label, at, at + size))
                at += size
            if at < start + length:
                found.append(("", at, start + length))
        return found

    def elements(self, parts: frozenset[Part], rank: int) -> dict[str, list[Range]]:
        """Ranges of elements that these parts are on a rank, by kind."""
        found: dict[str, list[Range]] = {}
        starts = self._starts()
        for part in sorted(parts, key=lambda part: part.unit):
            length = self.padded[part.unit] // (1 if part.whole else self.ranks)
            start = starts[part.unit] + (0 if part.whole else rank * length)
            if length:
                found.setdefault(part.kind, []).append((start, start + length))
        return found

    def sent(self, moment: Moment, rank: int) -> dict[str, list[Range]]:
        """Ranges of elements that a rank hands to others in a moment, by kind.

        In a reduce-scatter all but its own shard, in an all-gather its own, in an all-reduce both.
        """
        if moment.carries is None or self.ranks == 1:
            return {}
        kind, unit = moment.carries.kind, moment.carries.unit
        (mine,) = self.elements(frozenset([Part(kind, unit, False)]), rank)[kind]
        first = self._starts()[unit]
        others = [(first, mine[0]), (mine[1], first + self.padded[unit])]
        ranges = [r for r in others if r[0] < r[1] and moment.collective != "all_gather"]
        ranges += [mine] if moment.collective != "reduce_scatter" else []
        return {"parameters" if kind == "gathered" else kind: sorted(ranges)}

    def held_bytes(self, moment: Moment) -> dict[str, int]:
        """Bytes that each rank holds after a moment, by kind."""
        sizes = dict.fromkeys((*KINDS, "gathered"), 0)
        for part in moment.held:
            sizes[part.kind] += self.size(part)
        return sizes

    def size(self, part: Part) -> int:
        """Bytes of a part on each rank."""
        each = self.recipe.gather_bytes if part.kind == "gathered" else self.recipe.size(part.kind)
        return each * self.padded[part.unit] // (1 if part.whole else self.ranks)

    def _starts(self) -> list[int]:
        return [sum(self.padded[:place]) for place in range(len(self.padded))]


def walk(
    stage: int, ranks: int = 4, units: Sequence[Unit] = TOY, recipe: str | Recipe = DEFAULT_RECIPE
) -> Walk:
    """The moments of one step; ValueError for a stage or a number of ranks that is none.

    Stages 0 and 1 have one unit, the whole model: they send nothing before the step.
    """
    sharded_kinds(stage)
    n, chosen = whole("ranks", ranks, 1), tuple(units)
    if stage < 2:
        chosen = (Unit("model", tuple((_full(u, p), size) for u in units for p, size in
                                      u.parameters)),)  # fmt: skip
    padded = tuple(-(-unit.numel // n) * n for unit in chosen)
    empty = Walk(stage, n, recipe_named(recipe), chosen, padded, ())
    return replace(empty, moments=tuple(_moments(empty)))


def _full(unit: Unit, parameter: str) -> str:
    return unit.name if len(unit.parameters) == 1 else parameter


def _moments(w: Walk) -> Iterator[Moment]:
    numbers, sharded = range(len(w.units)), sharded_kinds(w.stage)
    held = {Part(kind, u, kind not in sharded) for kind in ("parameters", "optimizer_states")
            for u in numbers}  # fmt: skip

    def moment(
        name: str, add: Sequence[Part] = (), free: Sequence[Part] = (), collective: str = "",
        carries: Part | None = None,
    ) -> Moment:  # fmt: skip
        gone = frozenset(free) & held
        held.update(add)
        held.difference_update(free)
        sent = 0
        if carries is not None:
            gather = collective == "all_gather"
            each = w.recipe.gather_bytes if gather else w.recipe.reduce_bytes
            elements = w.padded[carries.unit] // w.ranks * (w.ranks - 1)
            sent = elements * each * (2 if collective == "all_reduce" else 1)
        return Moment(name, frozenset(held), gone, collective, carries, sent)

    def named(u: int) -> str:
        return w.units[u].name

    def whole_grads(u: int) -> Part:
        return Part("gradients", u, True)

    def own_grads(u: int) -> Part:
        return Part("gradients", u, False)

    def gathered(u: int) -> Part:
        return Part("gathered", u, True)

    yield moment("before the step")
    if w.stage < 2:
        yield moment("forward")
        yield moment("backward", add=[whole_grads(0)])
        if w.stage == 0:
            yield moment("all-reduce gradients", (), (), "all_reduce", whole_grads(0))
            yield moment("update all weights")
        else:
            yield moment("reduce-scatter gradients", (), (), "reduce_scatter", whole_grads(0))
            yield moment("update own weights")
            weights = Part("parameters", 0, True)
            yield moment("all-gather parameters", (), (), "all_gather", weights)
        yield moment("forget gradients; their memory waits for the next")
        return
    for u in numbers if w.stage == 3 else ():
        yield moment(f"all-gather {named(u)}", [gathered(u)], (), "all_gather", gathered(u))
        yield moment(f"forward of {named(u)}, then free it", free=[gathered(u)])
    if w.stage == 2:
        yield moment("forward")
    for u in reversed(numbers):
        if w.stage == 3:
            yield moment(f"all-gather {named(u)} again", [gathered(u)], (), "all_gather",
                         gathered(u))  # fmt: skip
        yield moment(f"backward of {named(u)}", add=[whole_grads(u)])
        if w.stage == 3:
            yield moment(f"free {named(u)}'s parameters", free=[gathered(u)])
        yield moment(f"reduce-scatter {named(u)}", [own_grads(u)], [whole_grads(u)],
                     "reduce_scatter", whole_grads(u))  # fmt: skip
    if w.stage == 3:
        yield moment("update own weights, free gradients", free=[own_grads(u) for u in numbers])
        return
    for u in numbers:
        yield moment(f"update own weights of {named(u)}")
        weights = Part("parameters", u, True)
        yield moment(f"all-gather {named(u)}", (), [own_grads(u)], "all_gather", weights)
