"""What would help when the toy device is full: the next stage, or else, in bytes from theory."""

from __future__ import annotations

import re

from zerolab.theory.memory import DEFAULT_RECIPE, held_bytes
from zerolab.theory.notation import KINDS, STAGES

_FULL = re.compile(r"and it has ([\d,]+); at this moment: (.+)")
_ELSE = {
    "gathered": "smaller units, or no prefetch, would gather fewer bytes at a time",
    "temporary": "smaller units would need smaller buffers to send and to update",
    "other": "no stage divides them; shorter or fewer sequences in a micro-batch, or "
    "recomputation, would leave less",
}
_NAMES = {"other": "activations, and what the model held before it was wrapped",
          "temporary": "buffers", "gathered": "gathered parameters"}  # fmt: skip


def breakdown_of(error: BaseException | str) -> tuple[int, dict[str, int]] | None:
    """Capacity, and bytes by kind, from what DeviceFull says; None for any other error."""
    found = _FULL.search(str(error))
    if not found:
        return None
    parts = re.findall(r"([a-z ]+?) (\d[\d,]*\d|\d)(?=, |$|\n)", found[2])
    held = {name.strip().replace(" ", "_"): int(size.replace(",", "")) for name, size in parts}
    return int(found[1].replace(",", "")), held


def what_would_help(
    error: BaseException | str, stage: int, ranks: int, params: int, recipe: str = DEFAULT_RECIPE
) -> str:
    """One sentence for a full device: its largest part, and what would make that smaller.

    Where the model states alone exceed the device it is about these, whatever else was there at
    the moment. "" for an error that is not DeviceFull. Padding is that of one flat unit.
    """
    if not (full := breakdown_of(error)):
        return ""
    capacity, held = full
    states = held_bytes(stage, ranks, params, recipe)
    too_large = states["total"] > capacity
    largest = max(KINDS if too_large else held, key=(states if too_large else held).__getitem__)
    if largest in _ELSE:
        return f"The largest part are {_NAMES[largest]}: {_ELSE[largest]}."
    sharded_from = len(KINDS) - KINDS.index(largest)
    better, more = max(stage, sharded_from), ranks
    if stage >= sharded_from or ranks == 1:
        more = 2 * ranks
    then = held_bytes(better, more, params, recipe)
    where = f"stage {better}" if more == ranks else f"{more} ranks at stage {better}"
    name = largest.replace("_", " ").capitalize()
    advice = (
        f"{name} are the largest part: {where} would hold {then[largest]:,} bytes of them "
        f"instead of {states[largest]:,}"
    )
    if not too_large:
        return f"{advice}."
    totals = {s: held_bytes(s, ranks, params, recipe)["total"] for s in STAGES}
    fits = [s for s in STAGES if totals[s] <= capacity]
    if not fits:
        return f"{advice}; on {ranks} ranks all states need {totals[3]:,} even at stage 3."
    return f"{advice}; all states together fit from stage {fits[0]} on ({totals[fits[0]]:,})."
