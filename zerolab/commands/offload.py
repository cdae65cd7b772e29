"""`--offload`: what `zerolab measure` and `zerolab train` put below the device."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab.practice.offload import Offload


def add_offload(parser: Any) -> None:
    """Adds the option to a command."""
    parser.add_argument(
        "--offload",
        metavar="WHAT=TIER",
        help="optimizer=cpu|disk,parameters=device|cpu|disk,schedule=plain|stream|delayed",
    )
    parser.add_argument("--offload-folder", metavar="DIR", help="where files of the disk tier go")


def expect_offload(arguments: argparse.Namespace) -> None:
    """ValueError for a folder of files that nothing goes to."""
    if arguments.offload_folder and not arguments.offload:
        raise ValueError("--offload-folder needs --offload, as in --offload optimizer=disk.")


def add_time(parser: Any) -> None:
    """Adds --time, which needs --offload."""
    text = "with --offload: predict a step's time from this machine's rates, beside the clock's"
    parser.add_argument("--time", action="store_true", help=text)


def print_rates(ranks: int, as_json: bool) -> int:
    """zerolab doctor --rates: what each of so many ranks gets while all are at work."""
    from dataclasses import asdict

    from zerolab.practice.rates import average, measure_rates
    from zerolab.practice.world import World

    with World(ranks, timeout=300) as world:
        rates = average(world.run(measure_rates))
    print(json.dumps(asdict(rates), indent=2) if as_json else "\n".join(rates.lines()))
    return 0


def offload_of(arguments: argparse.Namespace) -> Offload:
    """What --offload says; ValueError in one sentence for what it cannot mean."""
    from dataclasses import replace

    from zerolab.practice.offload import Offload

    return replace(Offload.read(arguments.offload), folder=arguments.offload_folder)


def measure_below(arguments: argparse.Namespace) -> int:
    """zerolab measure --offload: bytes of every tier and edge, derived and counted."""
    from zerolab.course.offload import measure_offload
    from zerolab.course.offload_time import time_offload

    a = arguments
    if a.stage is None:
        raise ValueError("--offload needs --stage: what is below the device depends on it.")
    recipe = a.recipe or "adamw-mixed"
    if a.time and a.steps is not None:
        raise ValueError("--time chooses its steps itself: leave out --steps.")
    if a.time:
        report = time_offload(a.stage, a.ranks, offload_of(a), recipe)
        print(json.dumps(report.as_dict(), indent=2) if a.json else report.as_text())
        return 0
    compared = measure_offload(
        a.stage, a.ranks, offload_of(a), recipe, 10 if a.steps is None else a.steps
    )
    print(json.dumps(compared.as_dict(), indent=2) if a.json else compared.as_text())
    return 0 if compared.agrees else 1
