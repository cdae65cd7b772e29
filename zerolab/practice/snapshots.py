"""A folder of checkpoints, of which each is there as a whole or not at all.

A checkpoint is written under another name and renamed when all of it is on the disk. Whatever
interrupts a save, the last finished one is still there, and the next save sweeps what is left.
Plain files and Python: what is in them, and which rank does what, is said in `checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

NAME = re.compile(r"step-\d{8,}")
KEPT = 2  # finished checkpoints: when the last is damaged there is one to go back to
MANIFEST = "manifest.json"
PARTS = {"recipe", "parameters", "steps", "updates", "about", "files"}  # of a manifest


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; the sentence says why, and what to do."""


def finished(folder: Path) -> list[Path]:
    """The checkpoints in a folder whose save came to its end, oldest first; nothing else in it."""
    return sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name))


def begin(path: Path) -> Path:
    """Makes and returns the folder to write a checkpoint into; sweeps what was left unfinished."""
    if path.exists():
        raise CheckpointError(f"{path} exists already: go on from it, or take another folder.")
    for left_over in path.parent.glob("step-*.partial"):
        if NAME.fullmatch(left_over.stem):
            shutil.rmtree(left_over)
    partial = path.with_suffix(".partial")
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, manifest: dict[str, Any]) -> None:
    """Adds the manifest and renames the folder, the moment from which on the checkpoint exists.

    `manifest["files"]` has the fingerprint of each file. The oldest checkpoints go.
    """
    for name in manifest["files"]:
        if not (partial / name).exists():
            raise CheckpointError(
                f"Rank 0 does not see {partial / name}: all ranks must share one folder."
            )
    text = json.dumps(manifest)
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        file.flush()
        os.fsync(file.fileno())
    folder = partial.parent
    for directory in (partial, folder):
        if directory == folder:
            partial.rename(partial.with_suffix(""))
        if hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
            descriptor = os.open(directory, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    for old in finished(folder)[:-KEPT]:
        shutil.rmtree(old.rename(old.with_suffix(".partial")))


def verified(folder: Path, part: int, parts: int) -> tuple[Path, dict[str, Any]]:
    """The last checkpoint and its manifest, once every `parts`-th of its files was compared."""
    if not (there := finished(folder)):
        raise CheckpointError(
            f"There is no checkpoint in {folder}: name the folder that training saved to, or "
            "start anew."
        )
    path, suspect = there[-1], there[-1] / MANIFEST
    after = f"to go on from {there[-2].name}" if there[:-1] else "and start anew"
    try:
        digest, _, text = suspect.read_text(encoding="utf-8").partition("\n")
        fine = hashlib.sha256(text.encode()).hexdigest() == digest
        manifest = json.loads(text) if fine else {"files": {}}
        if fine and not (isinstance(manifest, dict) and manifest.keys() >= PARTS):
            fine, manifest = False, {"files": {}}
        for name, saved in sorted(manifest["files"].items())[part::parts]:
            if fine:
                suspect = path / name
                fine = fingerprint(suspect) == saved
        why = "is not what was saved"
    except (OSError, ValueError):  # of the file system; of UTF-8 or JSON
        fine, why = False, "is missing or cannot be read"
    if not fine:
        raise CheckpointError(f"The checkpoint is damaged: {suspect} {why}. Remove {path} {after}.")
    return path, manifest


def compare(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises CheckpointError unless recipe and parameters are those of the engine here."""
    if saved["recipe"] != here["recipe"]:
        why = f"with the recipe {saved['recipe']}, and this one is {here['recipe']}"
        raise CheckpointError(f"{path} was saved {why}. Go on with the same, or start elsewhere.")
    ours, theirs = here["parameters"], saved["parameters"]
    for name in [*ours, *theirs]:
        there, now = theirs.get(name, "missing"), ours.get(name, "missing")
        if there != now:
            raise CheckpointError(
                f"{path} is another model's: {name} is {there} there and {now} here. Go on with "
                "the model that was saved, or start elsewhere."
            )


def fingerprint(path: Path) -> str:
    """A digest of a file's bytes, which any change would change."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
