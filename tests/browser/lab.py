"""JupyterLab as a learner starts it, and a page of a real browser that looks at one lesson."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import TimeoutError as TooLate
from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
WAIT_MS = 180_000

# The notebook's code cells from JupyterLab's own model, as cells out of sight are not drawn.
CELLS = """[...jupyterapp.shell.currentWidget.content.model.cells].filter(c => c.type === 'code')
  .map(c => ({id: c.id, source: c.sharedModel.source.trim(), count: c.executionCount,
              busy: c.executionState === 'running', tags: c.getMetadata('tags') || [],
              errors: c.outputs.toJSON().filter(o => o.output_type === 'error')}))"""

CONNECTED = """jupyterapp.shell.currentWidget.sessionContext.session?.kernel
  ?.connectionStatus === 'connected'"""
BUSY = f"{CELLS}.some(c => c.busy)"


@contextmanager
def lab_address(command: list[str], env: dict[str, str]) -> Iterator[str]:
    """Start JupyterLab by the command; its address, as printed. At the end, one Ctrl-C."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        for line in process.stdout:
            if address := re.search(r"http://\S+", line):
                yield address[0]
                break
        else:
            raise AssertionError("zerolab lab ended without an address")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(WAIT_MS / 1000)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, "Ctrl-C ends JupyterLab cleanly"


@contextmanager
def browser_context(profile: Path) -> Iterator[Any]:
    """Debian's Chromium, without a window and with a profile of its own."""
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1200, "height": 900},
        )
        context.set_default_timeout(WAIT_MS)
        context.set_default_navigation_timeout(WAIT_MS)
        yield context
        context.close()


class LessonPage:
    """A notebook, open in JupyterLab."""

    def __init__(self, context: Any, address: str, name: str) -> None:
        self.name = name
        self.complaints: list[str] = []  # what the browser's console calls an error
        self.server, _, rest = address.partition("lab/tree/")
        self.token = rest.partition("token=")[2]
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(f"{self.server}lab/tree/lessons/{name}?reset&token={self.token}")
        self.page.wait_for_selector(".jp-NotebookPanel-toolbar", timeout=WAIT_MS)
        idle = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
        self.page.wait_for_selector(idle, timeout=WAIT_MS)

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} {message.location.get('url', '')}")

    def click_menu(self, *names: str) -> None:
        for name in names:
            self.page.get_by_role("menuitem", name=name, exact=True).click()

    def in_the_way(self) -> list[str]:
        """Dialogs and pop-ups that a learner would have to click away."""
        return self.page.locator(".jp-Dialog, .Toastify__toast").all_inner_texts()

    def cells(self) -> list[dict[str, Any]]:
        """Each code cell's id, source, count, tags and errors."""
        return self.page.evaluate(CELLS)

    def start_all(self) -> None:
        """Clear what is stored, and run all cells without waiting for their end."""
        self.page.wait_for_function(CONNECTED, timeout=WAIT_MS)  # else JupyterLab asks: which one?
        self.click_menu("Edit", "Clear Outputs of All Cells")
        for _ in range(10):  # the menu does nothing until the kernel is connected: again, then
            self.click_menu("Run", "Run All Cells")
            try:
                started = f"{CELLS}.some(c => c.busy || c.count)"
                self.page.wait_for_function(started, timeout=3000)
                break
            except TooLate:
                continue
        else:
            raise AssertionError(f"{self.name}: Run All Cells does nothing")

    def run_all(self, limit_s: float = 800) -> None:
        """Run all cells, wait for the last or an error that stops all."""
        self.start_all()
        done = f"""{CELLS}.every(c => !c.busy) && ({CELLS}.every(c => c.count || !c.source)
          || {CELLS}.some(c => c.errors.length && !c.tags.includes('raises-exception')))"""
        try:
            self.page.wait_for_function(done, timeout=limit_s * 1000)
        except TooLate:
            waiting = [c["id"] for c in self.cells() if not c["count"]]
            raise AssertionError(f"{self.name}: not run: {waiting}; {self.failures()}") from None

    def failures(self) -> list[str]:
        """Cells that show an error and have no tag that says they should."""
        return [
            f"{self.name}, cell {cell['id']}: {error['ename']}: {error['evalue']}"
            for cell in self.cells()
            for error in cell["errors"]
            if "raises-exception" not in cell["tags"]
        ]

    def take_picture(self, folder: Path) -> Path:
        """The whole notebook in one picture, in a window as tall as it needs."""
        folder.mkdir(exist_ok=True)
        path = folder / f"{Path(self.name).stem}.png"
        top = "document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0"
        tall = "document.querySelector('.jp-WindowedPanel-viewport').scrollHeight"
        for _ in range(3):  # cells that come into sight have another height than was guessed
            height = min(self.page.evaluate(tall) + 150, 16_000)
            self.page.set_viewport_size({"width": 1200, "height": max(height, 900)})
            self.page.evaluate(top)
            self.page.wait_for_timeout(500)
        self.page.screenshot(path=path)
        return path

    def close(self) -> None:
        """Close the page and end its kernel, which would go on holding memory."""
        request, key = self.page.request, f"?token={self.token}"
        for session in request.get(f"{self.server}api/sessions{key}").json():
            request.delete(f"{self.server}api/sessions/{session['id']}{key}")
        self.page.close()
