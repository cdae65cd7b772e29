"""A newcomer's first command works, or says in one sentence why it cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED_EXTRAS = ("test", "browser", "docs", "grading")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "each line is name==version"
    names = [canonicalize_name(name) for name, _ in pairs]
    assert len(names) == len(set(names)), "each name is pinned once"
    return dict(zip(names, (version for _, version in pairs), strict=True))


def stated() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + [line for name in TESTED_EXTRAS for line in extras[name]]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("requirement", stated(), ids=lambda r: r.name)
def test_each_direct_dependency_is_pinned_inside_its_stated_range(requirement):
    assert requirement.specifier, "a range is stated"
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_pins_are_public_versions_from_no_place():
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}"


def test_conda_and_binder_install_what_pip_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, by_pip = environment["dependencies"]
    (python,) = [entry for entry in conda if entry.startswith("python")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    assert sorted(conda) == sorted([python, "pip"]), (
        "all the rest is stated once, in pyproject.toml"
    )
    constraints, package = by_pip["pip"]
    assert constraints == "-c constraints.txt"
    assert re.fullmatch(r"-e \.(\[[a-z,]+\])?", package)


def test_the_readme_names_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert "make lab" in readme
    assert "make test" in readme


@pytest.fixture
def checkout(tmp_path):
    """As much of a fresh clone as make looks at, with a folder for pretended Pythons."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(checkout: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *args],
        # the tests themselves may run under make, which would have a word in this
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"},
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


PRETENDED = {  # a Python that fails as the real one would -> what make says of it
    "old": ('case "$*" in *version_info*) exit 1;; *--version*) echo Python 3.9.2;; esac', "3.9.2"),
    "bare": ('case "$*" in *ensurepip*) exit 1;; esac', "sudo apt install python3-venv"),
    "missing": (None, "There is no"),
}


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("kind", PRETENDED)
def test_make_lab_says_in_one_sentence_which_python_is_missing(checkout, kind):
    script, sentence = PRETENDED[kind]
    python = checkout / f"python-{kind}"
    if script:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    ended = make(checkout, "lab", f"PYTHON={python}")
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(said) == 1, ended.stderr
    assert sentence in said[0]
    assert "Setting up" not in ended.stdout
    assert not (checkout / ".venv").exists()


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_lab_installs_once_and_again_when_the_requirements_change(checkout):
    def installs() -> bool:
        return "pip install" in make(checkout, "--dry-run", "lab").stdout

    assert installs()
    ready = checkout / ".venv" / "lab.ready"
    ready.parent.mkdir()
    ready.touch()
    assert not installs()
    for name in ("pyproject.toml", "constraints.txt"):
        later = time.time() + 10
        os.utime(checkout / name, (later, later))
        assert installs()
        os.utime(ready, (later, later))
        assert not installs()


def test_ci_runs_make_test_and_nothing_else():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
