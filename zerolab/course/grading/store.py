"""Keeps grades that stand already."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import zerolab
from zerolab.course.grading.judges import Submission, graded_from
from zerolab.course.grading.notebook import Graded
from zerolab.course.grading.submission import Unreadable, contents


@dataclass
class Store:
    """Grades that stand already, one file each, so that a run that was stopped can go on."""

    folder: Path | None
    _rules: str = field(default="", init=False)

    def key(self, submission: Submission, lesson_file: Path) -> Path | None:
        """The file for this notebook under these rules: it changes with either.

        None where nothing is kept, or the notebook cannot be read.
        """
        if self.folder is None:
            return None
        try:
            handed_in = contents(submission.path)
        except Unreadable:
            return None
        if not self._rules:
            sources = sorted(Path(zerolab.__file__).parent.glob("course/**/*.py"))
            self._rules = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()
        parts = [self._rules.encode(), lesson_file.read_bytes(), handed_in,
                 submission.student.encode()]  # fmt: skip
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
        return self.folder / f"{digest.hexdigest()[:32]}.json"

    def load(self, key: Path | None) -> Graded | None:
        """What is kept, or None; a file that was cut off counts for nothing."""
        try:
            kept = json.loads(key.read_text(encoding="utf-8")) if key else None
            if kept is None:
                return None
            return graded_from(kept)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, key: Path | None, graded: Graded) -> None:
        """Whole or not at all."""
        if key is None:
            return
        fresh = key.with_suffix(".new")
        try:
            key.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(graded.as_dict()), encoding="utf-8")
            os.replace(fresh, key)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise RuntimeError(
                f"a grade cannot be kept in {key.parent}: {error.strerror}; put that right and "
                "run it again to go on"
            ) from None
