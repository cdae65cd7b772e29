"""zerolab bench: the stages beside their peers, as ratios of one run."""

from __future__ import annotations

import argparse
import json
from typing import Any

LIMIT_S = 1800.0  # for the whole race


def add_bench(commands: Any) -> None:
    """Adds the command."""
    bench = commands.add_parser(
        "bench",
        help="time the stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed",
        description="Every engine trains the same model on the same data in interleaved rounds; a "
        "ratio below 1 means that the stage is faster than its peer. CPU seconds are disturbed "
        "less by other programs than wall time.",
    )
    bench.add_argument("--ranks", type=int, default=2, help="how many processes (default 2)")
    bench.add_argument("--rounds", type=int, default=7, help="steps of each engine (default 7)")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from zerolab.practice.bench import race, summary
    from zerolab.practice.world import World

    if arguments.rounds < 1:
        raise ValueError(f"{arguments.rounds} rounds time nothing: ask for at least 1.")
    with World(arguments.ranks, timeout=LIMIT_S) as world:
        result = summary(arguments.ranks, world.run(race, arguments.rounds))
    print(json.dumps(result, indent=2) if arguments.json else _text(result))
    return 0


def _text(result: dict[str, Any]) -> str:
    """Tables of ratios, and of bytes per parameter, for people."""
    lines = [
        f"{result['params']:,} parameters, {result['ranks']} ranks; {result['note']}",
        "",
        f"{'stage':9}{'peer':20}{'precision':10}{'wall':>7}{'CPU':>7}",
    ]
    for p in result["pairs"]:
        row = f"{p['ours']:9}{p['peer']:20}{p['precision']:10}"
        lines.append(f"{row}{p['ratio']:7.2f}{p['cpu_ratio']:7.2f}")
    title = f"{'bytes per parameter':22}{'sent':>8}{'on the wire':>13}"
    lines += ["", title]
    for name, e in result["engines"].items():
        wire = e["wire_bytes_per_parameter"]
        shown = "unknown" if wire is None else f"{wire:.2f}"
        lines.append(f"{name:22}{e['sent_bytes_per_parameter']:8.2f}{shown:>13}")
    versions = ", ".join(f"{name} {version}" for name, version in result["peers"].items())
    return "\n".join([*lines, "", f"peers: {versions}"])
