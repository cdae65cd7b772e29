"""The zerolab command: parses, calls, prints.

Exit 0 when all agrees, 1 when something does not, 2 when what was asked makes no sense.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from zerolab.commands.bench import add_bench
from zerolab.commands.grade import add_grade
from zerolab.commands.identify import add_identify
from zerolab.commands.measure import add_measure
from zerolab.commands.offload import print_rates
from zerolab.commands.plan import add_plan
from zerolab.commands.release import add_release
from zerolab.commands.train import add_train


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; whatever cannot be done is said in one sentence on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file on Windows takes no Greek letters
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"zerolab {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"zerolab {arguments.command}: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zerolab", description="Learn ZeRO by counting bytes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    lab = commands.add_parser("lab", help="open the course in JupyterLab")
    lab.add_argument("folder", nargs="?", type=Path, help="folder of notebooks (default: lessons)")
    lab.add_argument("--port", type=int, help="port on this machine (default: a free one)")
    lab.add_argument("--no-browser", action="store_true", help="print the address only")
    lab.set_defaults(run=_lab)

    doctor = commands.add_parser("doctor", help="say whether this machine can run the course")
    doctor.add_argument("--rates", action="store_true", help="how fast it copies, sends, updates")
    doctor.add_argument("--ranks", type=int, default=2, help="at work together (default 2)")
    doctor.add_argument("--json", action="store_true", help="print the rates as one JSON object")
    doctor.set_defaults(run=_doctor)

    add_plan(commands)

    add_measure(commands)
    add_identify(commands)
    add_train(commands)
    add_bench(commands)
    add_grade(commands)
    add_release(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One sentence instead of the usage text."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _lab(arguments: argparse.Namespace) -> int:
    from zerolab.course.lab import start_lab

    open_browser = False if arguments.no_browser else None
    return start_lab(arguments.folder, None, arguments.port, open_browser)


def _doctor(arguments: argparse.Namespace) -> int:
    from zerolab.practice.doctor import examine

    if arguments.rates:
        return print_rates(arguments.ranks, arguments.json)
    findings = examine()
    for finding in findings:
        print(finding)
    return 0 if all(finding.fine for finding in findings) else 1
