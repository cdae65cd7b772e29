"""The strict plugin passes what JupyterLab shows, and fails what was changed or never run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from zerolab.course.derive import run

TESTS = Path(__file__).resolve().parent

OPTIONS = [
    *("-p", "no:cacheprovider", "--rootdir=.", "--junitxml=report.xml"),
    *("--nbval", "--nbval-current-env", "--nbval-cell-timeout=30"),
]

# name -> source. Run as JupyterLab would, each of these is stored right, and must pass.
RIGHT = {
    "child": "import subprocess\nchild = subprocess.run(['echo', 'from a child'])\n"
    "import time\ntime.sleep(2)  # its line takes a way of its own",
    "semicolon": "'hidden';",
    "history": "41 + 1",
    "out": "print(Out[3])",
    "interact": "from ipywidgets import interact\n"
    "@interact(n=(0, 4))\ndef show(n=2):\n    print('captured', n)",
    "raises": "1 / 0",
    "custom": "from IPython.display import display\n"
    "display({'text/plain': 'bars', 'application/vnd.zerolab+json': {'bytes': 16}}, raw=True)",
    "plain": "print('16 bytes')",
}


def validate(folder: Path, *, strict: bool) -> dict[str, dict[str, str]]:
    """Run nbval over a folder: notebook -> cell's id -> why it failed, or ""."""
    plugin = ["-p", "nbval_strict"] if strict else []
    subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *OPTIONS, "."],
        cwd=folder,
        env={"PYTHONPATH": str(TESTS), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a pipe would stay open as long as a kernel does
        stderr=subprocess.DEVNULL,
        timeout=600,
    )
    result: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        stem = case.attrib["classname"].removesuffix(".ipynb")
        cells = nbformat.read(folder / f"{stem}.ipynb", 4).cells
        cell = cells[int(case.attrib["name"].removeprefix("Cell "))]
        result.setdefault(stem, {})[cell.id] = "".join(
            c.text or "" for c in case if c.tag == "failure"
        )
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """right.ipynb as JupyterLab would store it; wrong.ipynb, each cell wrong in its own way."""
    folder = tmp_path_factory.mktemp("notebooks")
    cells = [new_code_cell(source, id=name) for name, source in RIGHT.items()]
    cells[list(RIGHT).index("raises")].metadata.tags = ["raises-exception"]
    right = run(new_notebook(cells=cells), folder / "right.ipynb")
    nbformat.write(right, folder / "right.ipynb")

    by_id = {c.id: c for c in nbformat.from_dict(right).cells}
    by_id["plain"].outputs[0].text = "18 bytes\n"
    by_id["custom"].outputs[0].data["application/vnd.zerolab+json"] = {"bytes": 18}
    by_id["raises"].outputs[0].evalue = "division by one"
    by_id["child"].outputs.clear()
    changed = [by_id[name] for name in ("plain", "custom", "raises", "child")]
    failing_callback = "interact(lambda n: n / 0, n=(0, 4));"
    skipped = new_code_cell("print(2)", id="skip", execution_count=3)
    skipped.metadata.tags = ["nbval-skip"]
    nbformat.write(
        new_notebook(
            cells=[
                *changed,
                new_code_cell("x = 1", id="never-run"),
                new_code_cell("# NBVAL_IGNORE_OUTPUT\nprint(3)", id="ignore", execution_count=3),
                skipped,
                new_code_cell("from ipywidgets import interact", id="import", execution_count=4),
                new_code_cell(failing_callback, id="callback", execution_count=5),
            ]
        ),
        folder / "wrong.ipynb",
    )
    return folder


@pytest.fixture(scope="module")
def strict(folder):
    return validate(folder, strict=True)


@pytest.fixture(scope="module")
def plain(folder):
    return validate(folder, strict=False)


@pytest.mark.parametrize("name", RIGHT)
def test_what_jupyterlab_stores_passes(strict, name):
    assert strict["right"][name] == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("plain", "18 bytes"),
        ("custom", "mismatch 'application/vnd.zerolab+json'"),
        ("raises", "division by one"),
        ("child", "Unexpected output fields"),
        ("never-run", "was never run"),
        ("ignore", "no reason for wrong/ignore"),
        ("skip", "no reason for wrong/skip"),
        ("callback", "ZeroDivisionError"),
    ],
)
def test_what_changed_or_was_never_run_fails(strict, name, reason):
    assert reason in strict["wrong"][name]


def test_each_correction_is_still_needed(plain):
    """When nbval learns one of these, its correction can go."""
    wrongly_failed = {name for name, failure in plain["right"].items() if failure}
    assert wrongly_failed == {"child", "semicolon", "out", "interact"}
    wrongly_passed = {name for name, failure in plain["wrong"].items() if not failure}
    assert wrongly_passed == {"child", "never-run", "ignore", "skip", "import"}
