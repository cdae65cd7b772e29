"""What holds for all notebooks, seen without running them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbval_strict import UNCOMPARED

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for d in ("lessons", "solutions") for p in (ROOT / d).glob("*.ipynb"))
OPTING_OUT = {"nbval-ignore-output", "nbval-skip", "pytest-validate-ignore-output"}


def opts_out(cell) -> bool:
    words = {*cell.metadata.get("tags", [])}
    words |= {
        line.strip().lstrip("# ").lower().replace("_", "-")
        for line in cell.source.splitlines()
        if line.strip().startswith("#")
    }
    return cell.cell_type == "code" and bool(words & OPTING_OUT)


def test_exactly_the_listed_cells_are_not_compared():
    found = {
        f"{path.stem}/{cell.id}"
        for path in NOTEBOOKS
        for cell in nbformat.read(path, 4).cells
        if opts_out(cell)
    }
    assert found == set(UNCOMPARED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_notebook_has_one_title_and_skips_no_level(path):
    levels = []
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type != "markdown":
            continue
        fenced = False
        for line in cell.source.splitlines():
            fenced ^= line.startswith("```")
            if not fenced and line.startswith("#") and line.lstrip("#").startswith(" "):
                levels.append(len(line) - len(line.lstrip("#")))
    assert levels and levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
