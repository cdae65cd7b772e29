"""Start JupyterLab at a lesson: no pop-up before it, no question after it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path

# A default that the user's own settings still override: no "would you like news?" over the lesson.
QUIET = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}
}
NO_LESSONS = (
    "There are no lessons {where}: call zerolab lab inside the clone of the course, "
    "or name its folder as in: zerolab lab FOLDER"
)


class LabError(Exception):
    """Why JupyterLab cannot start, in one sentence."""


def find_lessons(folder: Path | None) -> tuple[Path, list[Path]]:
    """The folder that JupyterLab shall show, and the lessons in it by name.

    With no folder named: the current one, else the clone that this package runs from.
    """
    tried = [folder] if folder else [Path(), Path(__file__).parents[2]]
    for root in (path.resolve() for path in tried):
        for lessons in (root / "lessons", root):
            if found := sorted(lessons.glob("*.ipynb")):
                return root, found
    raise LabError(NO_LESSONS.format(where=f"in {folder}" if folder else "here"))


def choose(lessons: list[Path], notebook: str | None) -> Path:
    """The first lesson, or the one whose name begins as asked."""
    name = Path(notebook or "").name
    for lesson in lessons:
        if lesson.name.startswith(name):
            return lesson
    raise LabError(f"No lesson's name begins with {name}; the first is {lessons[0].name}.")


def has_display() -> bool:
    """Whether a browser that is opened here would be seen."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def require_free(port: int) -> None:
    """Raise LabError if somebody listens there: JupyterLab would answer with a page of log."""
    if not 0 < port < 65536:
        raise LabError(
            f"--port must be from 1 to 65535, not {port}; without it a free one is taken."
        )
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise LabError(f"Port {port} is in use; leave out --port and a free one is taken.")


def start_lab(
    folder: Path | None = None,
    notebook: str | None = None,
    port: int | None = None,
    open_browser: bool | None = None,
) -> int:
    """Run JupyterLab until Ctrl-C and return the exit code: 0, or 2 if it could not start.

    `open_browser` None means: if there is a display. The address is printed in any case.
    """
    try:
        root, lessons = find_lessons(folder)
        lesson = choose(lessons, notebook)
        if port is not None:
            require_free(port)
    except LabError as error:
        print(f"zerolab lab: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="zerolab-lab-") as private:
        _serve(root, lesson, port, has_display() if open_browser is None else open_browser, private)
    return 0


def _serve(root: Path, lesson: Path, port: int | None, open_browser: bool, private: str) -> None:
    from jupyterlab.labapp import LabApp

    # JupyterLab reads default settings from a labconfig folder in each folder of this path.
    defaults = Path(private, "labconfig", "default_setting_overrides.json")
    defaults.parent.mkdir()
    defaults.write_text(json.dumps(QUIET))
    paths = [private, os.environ.get("JUPYTER_CONFIG_PATH")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(path for path in paths if path)

    token = secrets.token_hex(24)
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.root_dir": root,
        "ServerApp.open_browser": open_browser,
        "ServerApp.answer_yes": True,  # one Ctrl-C ends it
        "Application.log_level": "ERROR",
        "IdentityProvider.token": token,
    }
    if port is not None:
        options |= {"ServerApp.port": port, "ServerApp.port_retries": 0}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options["ServerApp.allow_root"] = True  # in a container there is often nobody else
    arguments = [f"--{name}={value}" for name, value in options.items()]
    server = LabApp.initialize_server(argv=[*arguments, str(lesson)])

    def announce() -> None:
        page = f"lab/tree/{lesson.relative_to(root).as_posix()}"
        address = f"http://127.0.0.1:{server.port}{server.base_url}{page}?token={token}"
        print(f"JupyterLab is at {address}\nCtrl-C ends it.", flush=True)

    server.io_loop.add_callback(announce)  # runs once the server answers
    server.start()
