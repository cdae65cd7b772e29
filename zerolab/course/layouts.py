"""The dictionary of layouts, derived beside counted: who pads how is part of what is derived."""

from __future__ import annotations

from dataclasses import dataclass

from zerolab.course.partition import even_shards, row_shards
from zerolab.practice.gpt import GPT
from zerolab.practice.layouts import FSDP1, FSDP2, SMALL, Instants, watch_layout
from zerolab.practice.world import World
from zerolab.theory.layouts import LAYOUTS, Layout
from zerolab.theory.notation import plain

NUMBERS = ("states", "whole", "sent")


@dataclass(frozen=True)
class LayoutRow:
    """One layout; bytes of rank 0: all states after backward, whole on top at the end of forward,
    sent in a step of one micro-batch."""

    layout: Layout
    derived: dict[str, int]
    counted: dict[str, int]
    seen: Instants

    @property
    def agrees(self) -> bool:
        """Derived equals counted, and each unit is gathered as often as derived."""
        return self.derived == self.counted


@dataclass(frozen=True)
class LayoutTable:
    """The dictionary for people: formulas, then derived = counted where they are equal."""

    params: int
    ranks: int
    rows: tuple[LayoutRow, ...]

    def only(self, *names: str) -> LayoutTable:
        """These rows, in this order."""
        found = {row.layout.name: row for row in self.rows}
        return LayoutTable(self.params, self.ranks, tuple(found[name] for name in names))

    def __getitem__(self, name: str) -> Instants:
        return self.only(name).rows[0].seen

    @property
    def agrees(self) -> bool:
        """Every row does."""
        return all(row.agrees for row in self.rows)

    def __repr__(self) -> str:
        lines = [
            f"{self.params:,} parameters on {self.ranks} ranks, bytes of rank 0; derived = counted",
            f"{'':28}{'after backward':>16}{'whole, forward':>16}{'sent in a step':>16}",
        ]
        for row in self.rows:
            cells = "".join(f"{_cell(row, name):>16}" for name in NUMBERS)
            lines.append(f"{row.layout.name:28}{cells}")
        return "\n".join(lines)

    def _repr_markdown_(self) -> str:
        head = (
            "| layout | also | states after backward | whole, at the end of forward | sent |\n"
            "|---|---|---|---|---|\n"
        )
        return head + "\n".join(
            f"| {row.layout.name} | {row.layout.also} | "
            + " | ".join(f"{_formula(row.layout, n)}: {_cell(row, n)}" for n in NUMBERS) + " |"
            for row in self.rows
        )  # fmt: skip


def _formula(layout: Layout, name: str) -> str:
    return plain(getattr(layout, name)()).replace("*", "").replace("N_d", "N")


def _cell(row: LayoutRow, name: str) -> str:
    derived, counted = row.derived[name], row.counted[name]
    return f"{counted:,}" if derived == counted else f"{derived:,} ≠ {counted:,}"


def layout_table(world: World, names: tuple[str, ...] = tuple(LAYOUTS)) -> LayoutTable:
    """Runs each layout on the world's ranks; ValueError for one that there is not.

    HYBRID_SHARD shards over pairs: an even number of ranks from 4 on.
    """
    return LayoutTable(
        params=sum(unit_numels()),
        ranks=world.size,
        rows=tuple(layout_row(name, world) for name in names),
    )


def layout_row(name: str, world: World) -> LayoutRow:
    """One layout on the world's ranks, as rank 0 sees it."""
    seen = world.run(watch_layout, name)[0]
    entry = LAYOUTS[name]
    padded = padded_by(name, world.size)
    derived = {key: round(value) for key, value in entry.bytes_of(padded, world.size).items()}
    if entry.schedule == 0:  # each all-reduce sends the ring's share of real elements
        calls = unit_numels() if name == "NO_SHARD" else [sum(unit_numels())]
        derived["sent"] = sum(int(entry.bytes_of(size, world.size)["sent"]) for size in calls)
    counted = {
        "states": seen.backward["total"],
        "whole": seen.forward - seen.backward["total"],
        "sent": seen.sent["total"],
    }
    if name in FSDP1 or name in FSDP2:
        derived["gathers"] = entry.gathers() * len(unit_numels())
        counted["gathers"] = len(seen.gathers)
    return LayoutRow(entry, derived, counted, seen)


def padded_by(name: str, ranks: int) -> int:
    """Elements with the padding of the one who lays out: rank 0's own, times those who share.

    FSDP1 and the stages here pad each unit's flat buffer; FSDP2 deals out rows of each parameter;
    DDP and NO_SHARD divide nothing.
    """
    model = GPT(SMALL)
    shapes = [tuple(p.shape) for p in model.parameters()]
    units = unit_numels()
    if name in ("DDP", "NO_SHARD"):
        return sum(units)
    share = 2 if name == "HYBRID_SHARD" else ranks
    if name in FSDP2:
        widths = [p.numel() // p.shape[0] for p in model.parameters()]
        rows = (row_shards(shape[0], ranks)[0] for shape in shapes)
        return share * sum(own * width for own, width in zip(rows, widths, strict=True))
    assert name in FSDP1 or name.startswith("our stage")
    return share * sum(even_shards(numel, share)[0] for numel in units)


def unit_numels() -> list[int]:
    """Parameters of each unit of the model that is laid out."""
    return [sum(p.numel() for p in unit.parameters()) for unit in GPT(SMALL).units()]
