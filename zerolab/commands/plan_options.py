"""The options of `zerolab plan`, and the model, machine and strategy that they name."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # sympy is loaded when a plan is made, not when another command starts
    from zerolab.theory.catalog import Cluster
    from zerolab.theory.strategy import Strategy

OF_THE_STRATEGY = (
    "stage", "recipe", "micro_batch", "accumulation", "sequence", "recompute", "group",
    "tensor_parallel", "frozen", "tied",
)  # fmt: skip
OFFLOADED = ("optimizer", "parameters", "checkpoints")
EXCLUDE_ONE_ANOTHER = (
    ("params", "model"), ("ranks", "cluster"), ("device", "cluster"),
    ("compare", "fastest"), ("compare", "why"), ("compare", "type"),
)  # fmt: skip
CHOSEN_BY_FASTEST = {"stage", "micro_batch", "offload"}
KNOWN_TO_COMPARE = {
    "params", "model", "tied", "ranks", "device", "cluster", "nodes", "stage", "compare",
}  # fmt: skip


def number(text: str) -> float:
    """An int where the text means a whole number: 64, 7.5e9."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    return int(value) if value.is_integer() else value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options in four groups, as --help shows them."""

    def sized(group: Any, name: str, metavar: str, text: str) -> None:
        group.add_argument(name, type=number, metavar=metavar, help=text)

    def named(group: Any, name: str, metavar: str, text: str) -> None:
        group.add_argument(name, metavar=metavar, help=text)

    def asked(group: Any, name: str, text: str) -> None:
        group.add_argument(name, action="store_true", help=text)

    model = parser.add_argument_group("the model: --params or --model")
    sized(model, "--params", "X", "parameters, such as 7.5e9")
    named(model, "--model", "NAME", "such as llama2-7b, gpt2-xl, mixtral-8x7b")
    sized(model, "--sequence", "S", "tokens in a sequence (default: the model's)")
    text = "input and output tables are one parameter, or two (default: as released)"
    model.add_argument("--tied", action=argparse.BooleanOptionalAction, default=None, help=text)

    machine = parser.add_argument_group("the machine: --ranks, --device with --ranks, or --cluster")
    sized(machine, "--ranks", "N", "all ranks, one for each GPU")
    named(machine, "--device", "NAME", "the GPU, such as a100-80")
    named(machine, "--cluster", "NAME", "the node, such as dgx-a100")
    sized(machine, "--nodes", "M", "how many nodes (default 1)")
    named(machine, "--link", "L", "what a rank sends over: nvlink3, or bytes/s in one direction")
    sized(machine, "--cpu-memory", "BYTES", "of a node, for offload")
    sized(machine, "--nvme", "BYTES", "of a node, for offload")

    strategy = parser.add_argument_group("the strategy")
    sized(strategy, "--stage", "Z", "ZeRO stage, 0 to 3")
    named(strategy, "--recipe", "NAME", "precision recipe (default: adamw-mixed)")
    sized(strategy, "--micro-batch", "B", "sequences of a rank at a time (default 1)")
    sized(strategy, "--accumulation", "A", "micro-batches in a step (default 1)")
    named(strategy, "--recompute", "HOW", "none, selective or full")
    text = "optimizer, parameters or checkpoints: optimizer=cpu,parameters=nvme"
    named(strategy, "--offload", "WHAT=TIER", text)
    sized(strategy, "--group", "G", "hybrid sharding: ranks that share one copy")
    sized(strategy, "--tensor-parallel", "T", "ranks that share each layer (default 1)")
    sized(strategy, "--frozen", "F", "parameters that do not train")

    answer = parser.add_argument_group("the answer")
    asked(answer, "--json", "print one JSON object")
    asked(answer, "--why", "add the derivation behind each line")
    asked(answer, "--type", "add what one types: fully_shard lines, DeepSpeed's JSON")
    asked(answer, "--fastest", "choose stage, micro-batch and offload; recompute where it helps")
    asked(answer, "--compare", "all recipes, and what public calculators say, with the reasons")
    asked(answer, "--published", "every published figure beside ours; exit 1 where one differs")


def check(options: argparse.Namespace) -> None:
    """ValueError for options that exclude one another, an unknown model, and what is missing."""
    values = {name: value for name, value in vars(options).items() if value is not None}
    given = {name for name, value in values.items() if value is not False or name == "tied"}
    given -= {"json", "command", "run"}

    def leave_out(why: str, extra: set[str]) -> None:
        if extra:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(extra))
            raise ValueError(f"{why}: leave out {names}.")

    if "published" in given:
        leave_out("--published makes no plan", given - {"published"})
        return
    for one, other in EXCLUDE_ONE_ANOTHER:
        if {one, other} <= given:
            raise ValueError(f"--{one} and --{other} exclude one another: give one of them.")
    if "model" in given:
        from zerolab.theory import catalog

        catalog.model(options.model)  # a misspelt name is said before what else is missing
    if not {"params", "model"} & given:
        raise ValueError("A plan needs --params, such as 7.5e9, or --model, such as llama2-7b.")
    if not {"ranks", "device", "cluster"} & given:
        raise ValueError("A plan needs --ranks, --device, such as a100-80, or --cluster.")
    if "fastest" in given:
        leave_out("--fastest chooses by itself", given & CHOSEN_BY_FASTEST)
    elif "stage" not in given:
        raise ValueError("A plan needs --stage, 0 to 3, or --fastest, which chooses one.")
    if "compare" in given:
        leave_out("--compare asks for parameters, ranks and stage alone", given - KNOWN_TO_COMPARE)


def model_of(options: argparse.Namespace) -> str | float:
    """What --model or --params names."""
    return options.model if options.params is None else options.params


def strategy_of(options: argparse.Namespace) -> Strategy:
    """The strategy; ValueError where a stage or a tier cannot do it."""
    from zerolab.theory.strategy import Strategy

    chosen: dict[str, Any] = {name: getattr(options, name) for name in OF_THE_STRATEGY}
    for part in options.offload.split(",") if options.offload else ():
        what, _, tier = (word.strip() for word in part.partition("="))
        if what not in OFFLOADED or not tier:
            known = f"{', '.join(OFFLOADED)}, each with its tier"
            raise ValueError(f"--offload takes {known}, as in optimizer=cpu; {part!r} is not that.")
        if f"{what}_on" in chosen:
            raise ValueError(f"--offload names {what} twice: give it one tier.")
        chosen[f"{what}_on"] = tier
    return Strategy(**{name: value for name, value in chosen.items() if value is not None})


def machine_of(options: argparse.Namespace, strategy: Strategy | None = None) -> Cluster:
    """The machine; ValueError where a tier that the strategy uses has no capacity."""
    from zerolab.theory import catalog
    from zerolab.theory.values import one_of, whole

    nodes = whole("nodes", 1 if options.nodes is None else options.nodes, 1)
    if options.cluster:
        made = catalog.cluster(options.cluster, nodes)
    else:
        ranks = whole("ranks", nodes if options.ranks is None else options.ranks, 1)
        if ranks % nodes:
            raise ValueError(f"{ranks} ranks do not fill {nodes} nodes alike: give a multiple.")
        gpu = one_of("Device", options.device, catalog.GPUS) if options.device else ""
        host = catalog.LINKS[catalog.GPUS[gpu].host].bytes_per_s if gpu else 0
        made = catalog.Cluster(f"{ranks} {gpu or 'ranks'}", ranks // nodes, nodes, gpu)
        made = replace(made, host_bytes_per_s=host)
    if options.cpu_memory is not None:
        made = replace(made, cpu_bytes=whole("cpu-memory", options.cpu_memory))
    if options.nvme is not None:
        made = replace(made, nvme_bytes=whole("nvme", options.nvme))
    if options.link is not None:
        made = replace(made, rank_bytes_per_s=_rate(options.link))
    used = {getattr(strategy, f"{what}_on") for what in OFFLOADED} if strategy else set()
    if "nvme" in used and not made.nvme_bytes:
        raise ValueError("Offload to nvme needs its capacity: give --nvme, or a --cluster.")
    if used & {"cpu", "nvme"} and not made.cpu_bytes:
        raise ValueError("Offload needs the CPU's capacity: give --cpu-memory, or a --cluster.")
    return made


def _rate(link: str) -> float:
    """Bytes/s in one direction, of a number or of a link in the catalog."""
    from zerolab.theory.catalog import LINKS
    from zerolab.theory.values import one_of, whole

    try:
        return whole("link", number(link), 1)
    except argparse.ArgumentTypeError:
        return LINKS[one_of("Link", link, LINKS)].bytes_per_s
