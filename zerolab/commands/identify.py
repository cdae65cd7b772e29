"""zerolab identify: which stage a step function really is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

DESCRIPTION = """FUNCTION(model, comm) gets a small GPT with fp32 weights, the same on every rank,
and returns an engine with backward(loss) and step(), as the stages have, or a function
step(tokens, targets) that makes a whole step. It runs on ranks and is named by what it held and
sent; the optimizer is taken to be AdamW."""


def add_identify(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "identify", help="run a step on ranks and say which stage it is", description=DESCRIPTION
    )
    parser.add_argument("what", metavar="FILE:FUNCTION", help="such as steps.py:make")
    parser.add_argument("--ranks", type=int, default=4, help="how many processes (default 4)")
    parser.add_argument("--claim", help="what it is said to be: exit 1 where it is not")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_identify)


def _identify(options: argparse.Namespace) -> int:
    from zerolab.course.identify import identify
    from zerolab.practice.launcher.launch import launched
    from zerolab.practice.observe import load

    file, colon, function = options.what.rpartition(":")
    if not (file and colon and function):
        raise ValueError(f"{options.what!r} names no function: write FILE:FUNCTION.")
    with redirect_stdout(sys.stderr):  # what the file prints is no part of the result
        load(file, function)  # what is wrong with the file is said before ranks start
        found = identify((file, function), options.ranks, options.claim, options.timeout)
    if launched() and os.environ["RANK"] != "0":  # of a launcher's ranks the first one speaks
        return 0 if found.agrees else 1
    print(json.dumps(found.as_dict(), indent=2) if options.json else found.as_text())
    return 0 if found.agrees else 1
