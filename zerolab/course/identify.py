"""Which stage is this really? Named by what it held and sent, not by what it says of itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from zerolab.practice.observe import Seen, observe
from zerolab.practice.world import Attached, RankError, RankTimeout, World
from zerolab.theory.memory import held_bytes
from zerolab.theory.traffic import sent_bytes
from zerolab.theory.values import one_of

DATA_PARALLEL, SHARD_GRAD_OP, HYBRID, NONE = (
    "data parallel", "SHARD_GRAD_OP", "hybrid", "none of these",
)  # fmt: skip
STAGE_1, STAGE_2, STAGE_3 = "stage 1", "stage 2", "stage 3"
ALL_REDUCING = " that all-reduces"
NAMES = (
    DATA_PARALLEL, STAGE_1, STAGE_1 + ALL_REDUCING, STAGE_2, STAGE_2 + ALL_REDUCING, STAGE_3,
    SHARD_GRAD_OP, HYBRID, NONE,
)  # fmt: skip
# the stage that holds alike, and the schedule that sends alike
_THEORY: dict[str, tuple[int, int | str]] = {
    DATA_PARALLEL: (0, 0), STAGE_1: (1, 1), STAGE_1 + ALL_REDUCING: (1, "lecture-stage-1"),
    STAGE_2: (2, 2), STAGE_2 + ALL_REDUCING: (2, "lecture-stage-1"), STAGE_3: (3, 3),
    SHARD_GRAD_OP: (3, "shard-grad-op"),
}  # fmt: skip
NEAR = 0.12  # how far from a whole number of parts a kind may be: small buffers, uneven shards
LIMIT_S = 60.0
_KINDS = ("parameters", "gradients", "optimizer_states")


class TrainsNothing(ValueError):
    """After a step every weight is as it was."""


@dataclass(frozen=True)
class Identified:
    """What a step is, and the bytes that say so; per rank (the average), sent ones per step.

    parts       into how many parts each kind of state is divided: 1 is whole on every rank
    kept_bytes  what lives between two steps, by kind
    evidence    a sentence for each thing that gives an impostor away
    claimed     what it was said to be, or None
    """

    name: str
    ranks: int
    params: int
    parts: dict[str, int | None]
    held_bytes: dict[str, int]
    kept_bytes: dict[str, int]
    sent_bytes: dict[str, int]
    peak_bytes: int
    wire_bytes: int | None
    evidence: list[str]
    claimed: str | None = None

    @property
    def agrees(self) -> bool:
        """It is what it was said to be, or nothing was said."""
        return self.claimed in (None, self.name)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """The name, a line for each kind, and the evidence."""
        said = "" if self.agrees else f", not {self.claimed}"
        lines = [f"This is {self.name}{said} ({self.params:,} parameters, {self.ranks} ranks)."]
        for kind in _KINDS:
            parts = self.parts[kind]
            how = {1: "whole on every rank", None: "neither whole nor an even part"}.get(
                parts, f"one of {parts} parts"
            )
            words = kind.replace("_", " ")
            lines.append(f"  {words:17}{self.held_bytes[kind]:>12,} bytes per rank: {how}")
        for name, size in self.sent_bytes.items():
            if size:
                lines.append(f"  sent, {name.replace('_', '-'):15}{size:>8,} bytes per rank, step")
        return "\n".join([*lines, *(f"- {sentence}" for sentence in self.evidence)])


def identify(
    make: Callable[..., Any] | tuple[str, str] | str,
    ranks: int = 4,
    claimed: str | None = None,
    timeout: float = LIMIT_S,
    world: World | None = None,
) -> Identified:
    """Runs a step on ranks and names it; `zerolab.practice.observe` says what `make` is.

    The optimizer is taken to be AdamW: two fp32 moments, and master weights where the parameters
    work in 16 bits. ValueError, in one sentence, for what cannot be run or named.
    """
    if claimed is not None:  # Stage-3 and shard-grad-op are as good
        plain = {name.lower().replace("_", " ").replace("-", " "): name for name in NAMES}
        claimed = plain.get(claimed.lower().replace("_", " ").replace("-", " "), claimed)
        one_of("The name", claimed, NAMES)
    if ranks < 2:
        raise ValueError(f"On {ranks} rank every stage is the same: use at least 2.")
    try:
        if world is None:
            with World(ranks, timeout=timeout) as own_world, _one_tells(own_world):
                return name_it(own_world.run(observe, make), own_world.size, claimed)
        return name_it(world.run(observe, make, timeout=timeout), world.size, claimed)
    except RankTimeout as error:
        where = str(error).partition(": ")[2]
        raise ValueError(f"The step did not return within {timeout:g} s: {where}.") from None
    except RankError as error:
        raise ValueError(f"The step stopped on {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def _one_tells(world: Any) -> Iterator[None]:
    """Of a launcher's ranks, on which errors come up, the first tells of it in one sentence."""
    try:
        yield
    except Exception as error:
        if not isinstance(world, Attached):
            raise
        if not world.first():
            raise SystemExit(2) from None
        if isinstance(error, TrainsNothing):
            raise
        where = f"rank {os.environ['RANK']}: {type(error).__name__}"
        raise ValueError(f"The step stopped on {where}: {error}") from None


def name_it(seen: list[Seen], ranks: int, claimed: str | None = None) -> Identified:
    """Names what every rank showed; raises TrainsNothing."""
    first = seen[0]
    if all(s.weights[0] == s.weights[1] for s in seen):
        raise TrainsNothing("The step trains nothing: after a step every weight is as it was.")
    held, kept, sent, elements = (
        _mean([getattr(s, name) for s in seen]) for name in ("held", "kept", "sent", "elements")
    )
    buffers, held = held.get("temporary", 0), _by_kind(held, first, ranks)
    parts = {kind: _parts(held[kind], whole, ranks) for kind, whole in _whole(first).items()}
    passes = _passes(elements, first.params, ranks)
    more = first.elements_of_2
    of_2 = None if more is None else _passes(more, first.params, ranks)
    drift = parts["parameters"] == 1 and len({s.weights[1] for s in seen}) > 1
    name = NONE if drift else _name(parts, passes, ranks)
    evidence = []
    if drift:
        evidence.append("After the step the ranks' weights differ: their updates never met.")
    made = Identified(
        name=name,
        ranks=ranks,
        params=first.params,
        parts=parts,
        held_bytes=held,
        kept_bytes=kept,
        sent_bytes={k: v for k, v in sent.items() if k != "control"},
        peak_bytes=max(s.peak for s in seen),
        wire_bytes=None if first.wire is None else round(first.wire / ranks),
        evidence=evidence,
        claimed=claimed,
    )
    evidence += _giveaways(made, passes, of_2, first)
    if buffers > NEAR * sum(held.values()):
        evidence.append(f"Its buffers have {buffers:,} bytes besides.")
    if not made.agrees:
        evidence += _against(str(claimed), made, first)
    return made


def _mean(each: list[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for sizes in each for name in sizes)
    return {name: round(sum(s.get(name, 0) for s in each) / len(each)) for name in names}


def _recipe(seen: Seen) -> str:
    return "adamw-mixed" if seen.element == 2 else "adamw-fp32"


def _whole(seen: Seen) -> dict[str, int]:
    """Bytes of each kind where nothing is sharded."""
    sizes = held_bytes(0, 1, seen.params, _recipe(seen))
    if seen.element == 2:  # gradients may be kept wider than parameters: as wide as they are sent
        for name in ("reduce_scatter", "all_reduce"):
            if seen.elements.get(name):
                element = round(seen.sent[name] / seen.elements[name])
                sizes["gradients"] = element * seen.params
    return {kind: sizes[kind] for kind in _KINDS}


def _by_kind(held: dict[str, int], seen: Seen, ranks: int) -> dict[str, int]:
    """The three kinds: what nobody named are states, gathered parameters are parameters.

    Buffers, which somebody named temporary, are left out.
    """
    parameters = held.get("parameters", 0) + held.get("gathered", 0)
    states = held.get("optimizer_states", 0) + held.get("other", 0)
    if parameters < seen.params * seen.element / ranks / 2:  # shards that nobody named
        nameless = seen.params * seen.element // ranks - parameters
        parameters, states = parameters + nameless, states - nameless
    sizes = (parameters, held.get("gradients", 0), states)
    return dict(zip(_KINDS, sizes, strict=True))


def _parts(size: int, whole: int, ranks: int) -> int | None:
    """Into how many equal parts a kind is divided; None where that is no divisor of the ranks."""
    if size >= whole * (1 - NEAR):
        return 1
    for parts in range(2, ranks + 1):
        if ranks % parts == 0 and abs(size * parts / whole - 1) < NEAR:
            return parts
    return None


def _passes(elements: dict[str, int], params: int, ranks: int) -> dict[str, float]:
    """Passes over all parameters, of Ψ(N-1)/N elements each; an all-reduce makes two."""
    unit = params * (ranks - 1) / ranks
    kinds = {"all_reduce": ("all_reduce",), "reduce": ("reduce_scatter", "reduce", "all_to_all"),
             "gather": ("all_gather", "broadcast"), "send": ("send",)}  # fmt: skip
    return {kind: sum(elements.get(n, 0) for n in names) / unit for kind, names in kinds.items()}


def _name(parts: dict[str, int | None], passes: dict[str, float], ranks: int) -> str:
    p, g, s = (parts[kind] for kind in _KINDS)
    once = passes["all_reduce"] > 1.5
    gathers = round(passes["gather"])
    if (p, g, s) == (1, 1, 1):
        return DATA_PARALLEL if once and gathers == 0 else NONE
    if (p, s) == (1, ranks) and gathers == 1 and g in (1, None, ranks):
        return (STAGE_1 if g == 1 else STAGE_2) + (ALL_REDUCING if once else "")
    if (p, g, s) == (ranks,) * 3 and gathers in (1, 2):
        return STAGE_3 if gathers == 2 else SHARD_GRAD_OP
    if p == g == s and p is not None and 1 < p < ranks:
        return HYBRID
    return NONE


def _giveaways(
    found: Identified, passes: dict[str, float], of_2: dict[str, float] | None, seen: Seen
) -> list[str]:
    """What does not fit together in it, with the bytes."""
    n, params, parts, said = found.ranks, found.params, found.parts, []
    recipe = _recipe(seen)
    p, g, s = (parts[kind] for kind in _KINDS)
    at_2 = -(-params // n) * (_whole(seen)["gradients"] // params)
    if p == 1 and g == 1 and s == n and of_2 and of_2["reduce"] > 1.5 * passes["reduce"] > 0:
        said.append(
            "Gradients leave after every backward, as at stage 2, but a rank still holds "
            f"{found.held_bytes['gradients']:,} bytes of them, where stage 2 holds {at_2:,}."
        )
    total, due = found.sent_bytes["total"], sent_bytes(1, n, params, recipe)["total"]
    if found.name.endswith(ALL_REDUCING):
        each, plain = total / params * n / (n - 1), found.name.removesuffix(ALL_REDUCING)
        said.append(
            f"It sends {total:,} bytes a step, {each:.0f}Ψ(N-1)/N, where {plain} needs {due:,}: a "
            "rank uses only its slice of the sums, so a reduce-scatter is enough."
        )
    if found.name.startswith(STAGE_2) and g is None:
        said.append(
            f"A rank holds {found.held_bytes['gradients']:,} bytes of gradients, where its slice "
            f"has {at_2:,}."
        )
    if s == 1 and passes["gather"] > 0.5:
        size = held_bytes(1, n, params, recipe)["optimizer_states"]
        said.append(
            f"It hands updated parameters round, but every rank holds "
            f"{found.held_bytes['optimizer_states']:,} bytes of optimizer states, where its slice "
            f"has {size:,}."
        )
    if p == 1 and passes["gather"] > 1.5:
        said.append(
            f"It gathers parameters {passes['gather']:.0f} times a step, as stage 3 does, but "
            f"keeps all {found.held_bytes['parameters']:,} bytes of them."
        )
    if of_2 and found.name == DATA_PARALLEL and of_2["all_reduce"] > 1.5 * passes["all_reduce"]:
        said.append("It all-reduces after every micro-batch: once a step is enough.")
    if total == 0:
        said.append("It sends nothing: every rank trains a model of its own.")
    return said


def _against(claimed: str, found: Identified, seen: Seen) -> list[str]:
    """The bytes that differ from what was claimed."""
    if claimed not in _THEORY:
        return []
    stage, schedule = _THEORY[claimed]
    recipe = _recipe(seen)
    due = held_bytes(stage, found.ranks, found.params, recipe)
    said = []
    for kind in _KINDS:
        counted = found.held_bytes[kind]
        if abs(counted / due[kind] - 1) > NEAR:
            words = kind.replace("_", " ")
            said.append(f"{claimed} holds {due[kind]:,} bytes of {words}; this holds {counted:,}.")
    if {round(seen.sent[k] / n) for k, n in seen.elements.items() if n} == {2}:  # fp32 at home
        recipe = "adamw-mixed"
    traffic = sent_bytes(schedule, found.ranks, found.params, recipe)["total"]
    if abs(found.sent_bytes["total"] / traffic - 1) > NEAR:
        total = found.sent_bytes["total"]
        said.append(f"{claimed} sends {traffic:,} bytes a step; this sends {total:,}.")
    return said
