"""zerolab bench: the stages beside their peers, as ratios of one run."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from typing import Any

LIMIT_S = 1800.0  # for the whole race
DEEPSPEED_3 = (
    "set to free every parameter after each use; by default it keeps those under 100,000\n"
    "elements whole and others until backward, which at this size is stage 2 and sends 2/3 of it"
)


def add_bench(commands: Any) -> None:
    """Adds the command."""
    bench = commands.add_parser(
        "bench",
        help="time the stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed",
        description="Every engine trains the same model on the same data in interleaved rounds, in "
        "two heats, the second in reverse order; a ratio below 1 means that the stage is faster "
        "than its peer. CPU seconds are disturbed less by other programs than wall time.",
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
    # what a peer prints while it sets itself up is no part of the result
    with World(arguments.ranks, timeout=LIMIT_S) as world, redirect_stdout(sys.stderr):
        result = summary(arguments.ranks, world.run(race, arguments.rounds))
    print(json.dumps(result, indent=2) if arguments.json else text(result))
    return 0


def text(result: dict[str, Any]) -> str:
    """Tables of ratios, of CPU time and of bytes per parameter, for people."""
    title = f"{'stage':9}{'peer':20}{'precision':10}{'wall':>7}{'CPU':>7}"
    lines = [
        f"{result['params']:,} parameters, {result['ranks']} ranks; {result['note']}",
        "",
        f"{title}{'added':>7}   native: wall    CPU",
    ]
    for p in result["pairs"]:
        row = f"{p['ours']:9}{p['peer']:20}{p['precision']:10}"
        row += f"{p['ratio']:7.2f}{p['cpu_ratio']:7.2f}"
        row += f"{p['added_cpu_ratio']:7.2f}" if p["added_cpu_ratio"] else f"{'':7}"
        if p["native_ratio"]:
            row += f"{p['native_ratio']:15.2f}{p['native_cpu_ratio']:7.2f}"
        lines.append(row)
    lines += ["", "added: CPU time beyond forward and backward, ours / the peer's"]
    lines += ["native: the stage on gloo's own collectives, whose reduce-scatter sends twice"]
    lines += ["alone: forward and backward and nothing else, which no engine can save"]
    parts = ["forward_backward", "optimizer", "network_threads", "rest"]
    names = ["whole", "fwd+bwd", "AdamW", "network", "rest"]
    lines += ["", f"{'CPU ms a step, all ranks':26}" + "".join(f"{name:>9}" for name in names)]
    for name, e in result["engines"].items():
        spent = [e["cpu_s"], *(e["cpu_parts_s"][part] for part in parts)]
        lines.append(f"{name:26}" + "".join(f"{1000 * seconds:9.0f}" for seconds in spent))
    lines += ["", f"{'bytes per parameter, each rank':32}{'held':>8}{'sent':>8}{'on the wire':>13}"]
    for name, e in result["engines"].items():
        wire = e["wire_bytes_per_parameter"]
        shown = "unknown" if wire is None else f"{wire:.2f}"
        row = f"{name:32}{e['held_bytes_per_parameter']:8.2f}"
        lines.append(f"{row}{e['sent_bytes_per_parameter']:8.2f}{shown:>13}")
    lines += ["held: after backward and before the update, gradients and buffers included"]
    if "deepspeed-3" in result["engines"]:
        lines += [f"deepspeed-3: {DEEPSPEED_3}"]
    versions = ", ".join(f"{name} {version}" for name, version in result["peers"].items())
    return "\n".join([*lines, "", f"peers: {versions}"])
