"""Build the static site in build/site: python docs/build.py

Nothing is run: pages show the outputs that the lessons store.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parent.parent


def with_alternative_texts(notebook: Any) -> Any:
    """Pictures get the description that is stored beside them; else it would be a file's name."""
    for cell in notebook.cells:
        described = [
            output.data.get("text/plain", "")
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        if described:
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(described)}}
    return notebook


def main(target: Path = ROOT / "build" / "site") -> int:
    """Sphinx's exit code; a warning is an error."""
    source = target.with_name("site-source")
    for folder in (source, target):
        shutil.rmtree(folder, ignore_errors=True)
    (source / "lessons").mkdir(parents=True)
    for name in ("docs/conf.py", "docs/index.md", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "docs" / "guide", source / "docs" / "guide")
    for path in sorted((ROOT / "lessons").glob("*.ipynb")):
        notebook = with_alternative_texts(nbformat.read(path, as_version=4))
        nbformat.write(notebook, source / "lessons" / path.name)
    return sphinx(["-b", "html", "-W", "--keep-going", "-q", str(source), str(target)])


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
