"""The larger commands: each adds its options, calls theory, practice or course, and prints."""

import os
from pathlib import Path


def expect_folder(option: str, folder: Path) -> None:
    """Makes the folder if it is not there; ValueError where nothing could be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{option} {folder} cannot be made into a folder: {error.strerror}"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {folder}: the folder is not writable")
