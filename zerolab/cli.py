"""The zerolab command: parses, calls, prints.

Exit 0 when all agrees, 1 when something does not, 2 when what was asked makes no sense, 130 after
Ctrl-C (grade: or SIGTERM), 141 when nobody reads on what is printed (`zerolab plan ... | head -1`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

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
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who called
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 -- open until the end
        elif isinstance(stream, io.TextIOWrapper):  # a file on Windows takes no Greek letters
            stream.reconfigure(errors="replace")
    asked = argparse.Namespace(command="")
    try:
        with _printed():
            _parser().parse_args(_no_empty_words(argv), asked)
            return asked.run(asked)
    except BrokenPipeError:
        return 141
    except (ValueError, RuntimeError, OSError) as error:
        return _say(asked, str(error), 2)
    except ImportError as error:
        return _say(asked, f"{error}; zerolab doctor says what is missing", 2)
    except KeyboardInterrupt as stop:
        return _say(asked, str(stop) or "stopped", 130)


def _say(asked: argparse.Namespace, sentence: str, code: int) -> int:
    line = " ".join(sentence.split())  # a torch error may have several
    try:
        print(f"zerolab {asked.command}".rstrip() + f": {line}", file=sys.stderr)
    except OSError:
        _let_go(sys.stderr)
    return code


def _let_go(stream: TextIO) -> None:
    """What the stream still has goes nowhere: Python would try once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _printed() -> Iterator[None]:
    """What is printed inside has left when it ends, or the error is raised here, and once."""
    try:
        yield
    finally:
        for stream in (sys.stderr, sys.stdout):
            try:
                stream.flush()
            except OSError:
                _let_go(stream)
                if stream is sys.stdout:
                    raise


def _no_empty_words(argv: Sequence[str] | None) -> list[str]:
    """The words of the command line; an empty one is most likely a variable that is not set."""
    words = sys.argv[1:] if argv is None else list(argv)
    for before, word in zip(["", *words], words, strict=False):
        if not word.strip() or (word.startswith("--") and word.endswith("=")):
            what = f"after {before} " if before.startswith("-") and not word.strip() else ""
            raise ValueError(f"an argument {what}is empty: give it a value, or leave it out.")
    return words


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
    doctor.add_argument("--ranks", type=int, help="at work together (default 2)")
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
        return print_rates(2 if arguments.ranks is None else arguments.ranks, arguments.json)
    if arguments.json or arguments.ranks is not None:
        raise ValueError("--ranks and --json need --rates.")
    findings = examine()
    for finding in findings:
        print(finding)
    return 0 if all(finding.fine for finding in findings) else 1
