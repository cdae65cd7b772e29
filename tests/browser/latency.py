"""How long from a key on a slider to new pixels: python tests/browser/latency.py

Medians and the slowest of 25 moves of each explorer, in milliseconds, in JupyterLab in Chromium.
Meant for a quiet machine; no test depends on it. Goal: median at most 80, none over 150.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import nbformat
from lab import LessonPage, browser_context, lab_address
from nbformat.v4 import new_code_cell, new_notebook

from zerolab.course.derive import METADATA

EXPLORERS = {  # and the slider that is moved, by its place among the explorer's sliders
    "memory_explorer": 0,
    "overlap_explorer": 2,
    "shard_map_explorer": 2,
    "offload_planner": 1,
}
MOVES, WARM_UP = int(os.environ.get("MOVES", "25")), 4
# From the key to the frame that paints the new picture, which is decoded by then.
WATCH = """box => new Promise(done => {
  let start = 0;
  const before = box.querySelector('img').src;
  const note = () => { start = performance.now(); };
  document.addEventListener('keydown', note, {capture: true, once: true});
  new MutationObserver(async (_, observer) => {
    const image = box.querySelector('img');
    if (!image || image.src === before) return;  // only the slider's own readout has changed
    observer.disconnect();
    await image.decode();
    requestAnimationFrame(() => done(performance.now() - start));
  }).observe(box, {subtree: true, childList: true});
})"""


def moves(page: LessonPage, place: int, slider: int) -> list[float]:
    """Milliseconds of each move of one slider, there and back, the first few left out."""
    box = page.page.locator(".zerolab-explorer").nth(place)
    handle = box.locator(".noUi-handle").nth(slider)
    handle.focus()
    handle.press("Home")
    page.page.wait_for_timeout(1500)
    found = []
    for number in range(MOVES + WARM_UP):
        page.page.evaluate("() => document.activeElement.blur()")
        handle.focus()
        watch = box.evaluate_handle(f"box => {{ window.moved = ({WATCH})(box) }}")
        handle.press("ArrowRight" if number % 6 < 3 else "ArrowLeft")
        found.append(page.page.evaluate("() => window.moved"))
        watch.dispose()
        page.page.wait_for_timeout(300)
    return found[WARM_UP:]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        cells = [new_code_cell("from zerolab.course.widgets import *", id="imports")]
        cells += [new_code_cell(f"{name}().show()", id=name) for name in EXPLORERS]
        (home / "lessons").mkdir()
        notebook = new_notebook(cells=cells, metadata=METADATA)
        nbformat.write(notebook, home / "lessons" / "latency.ipynb")
        config = {"LabApp": {"expose_app_in_browser": True}}
        (home / "jupyter_lab_config.json").write_text(json.dumps(config))
        env = {**os.environ, "JUPYTER_CONFIG_DIR": folder, "JUPYTERLAB_SETTINGS_DIR": folder,
               "JUPYTERLAB_WORKSPACES_DIR": f"{folder}/workspaces"}  # fmt: skip
        command = [str(Path(sys.executable).with_name("zerolab")), "lab", folder, "--no-browser"]
        with lab_address(command, env) as address, browser_context(home / "profile") as context:
            page = LessonPage(context, address, "latency.ipynb")
            page.page.set_viewport_size({"width": 1200, "height": 5200})
            page.run_all()
            page.page.wait_for_timeout(2000)
            for place, (name, slider) in enumerate(EXPLORERS.items()):
                ms = moves(page, place, slider)
                found = f"median {statistics.median(ms):4.0f} ms   slowest {max(ms):4.0f} ms"
                print(f"{name:20} {found}   load {os.getloadavg()[0]:.1f}", flush=True)
            page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
