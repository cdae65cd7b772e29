"""A pytest plugin: nbval compares notebooks as JupyterLab runs them, and compares more.

nbval differs from JupyterLab in four ways, so that right notebooks fail and wrong ones pass. Each
function below corrects one of them. The fifth correction is ours: who wants an output uncompared
must say why, in UNCOMPARED. All of it acts only under `--nbval`, never under `--nbval-lax`.
"""

from __future__ import annotations

import os

# Cells whose output is not compared: "notebook's stem/cell's id" -> the reason.
# tests/test_notebooks.py fails when an entry no longer has its cell.
UNCOMPARED: dict[str, str] = {}

CAPTURED = {
    "stream",
    "display_data",
    "execute_result",
    "clear_output",
    "update_display_data",
}  # an error is not among them: an exception in a callback must fail the cell


def pytest_configure(config):
    if config.getoption("nbval", default=False):
        import nbval.kernel
        import nbval.plugin

        correct_environment(nbval.kernel)
        correct_history(nbval.kernel.RunningKernel)
        correct_captured_output(nbval.plugin.IPyNbFile)
        correct_uncompared(nbval.plugin.IPyNbCell)


def correct_environment(module):
    """ipykernel leaves out what child processes print if this variable of pytest's is set."""
    start = module.start_new_kernel

    def start_new_kernel(*args, **kwargs):
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        return start(*args, **{"env": env, **kwargs})

    module.start_new_kernel = start_new_kernel


def correct_history(kernel):
    """nbval stores no history; then a closing `;` hides nothing, and `_`, Out and In break."""

    def execute_cell_input(self, cell_input, allow_stdin=None):
        return self.kc.execute(
            cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
        )

    kernel.execute_cell_input = execute_cell_input


def correct_captured_output(notebook):
    """What an Output widget (interact) captures belongs to the widget and not to the cell."""
    receive = notebook.get_kernel_message

    def get_kernel_message(self, timeout=None, stream="iopub"):
        capturing = self.__dict__.setdefault("_capturing", {})  # widget -> the request it captures
        while True:
            message = receive(self, timeout, stream)
            content, kind = message["content"], message["msg_type"]
            if kind in ("comm_open", "comm_msg"):
                state = content.get("data", {}).get("state", {})
                if "msg_id" in state:
                    capturing[content["comm_id"]] = state["msg_id"]
            captured = message["parent_header"].get("msg_id") in filter(None, capturing.values())
            if not (captured and kind in CAPTURED):
                return message

    notebook.get_kernel_message = get_kernel_message


def correct_uncompared(cell_class):
    """nbval passes a cell that was never run, and lets any cell opt out of the comparison."""
    runtest = cell_class.runtest

    def strict_runtest(self):
        key = f"{self.parent.path.stem}/{self.cell.get('id')}"
        if self.options["skip"] or not self.options["check"]:
            if key not in UNCOMPARED:
                self.raise_cell_error(f"is not compared, and UNCOMPARED has no reason for {key}")
        elif self.cell.source.strip() and self.cell.execution_count is None:
            self.raise_cell_error("was never run, so nothing would be compared")
        return runtest(self)

    cell_class.runtest = strict_runtest
