"""Tiers below the GPU: what may live there, and the bandwidth that each edge then needs.

ZeRO-Offload (arXiv 2101.06840, §3) cuts a step's data-flow graph between GPU and CPU; ZeRO-Infinity
(arXiv 2104.07857, §4) asks how fast a tier must be. Edge weights are bytes per parameter and step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import sympy as sp

from zerolab.theory.derivation import Derivation, quotient
from zerolab.theory.memory import DEFAULT_RECIPE, Recipe, padded_params, recipe_named
from zerolab.theory.notation import TIERS, A, L, N_d, Psi, b, h, s
from zerolab.theory.values import one_of, whole

MOVABLE = ("param16", "grad16", "states", "update", "float2half")
GPU_BYTES = {"param16": 2, "grad16": 2, "states": 12}
EDGES = (  # ZeRO-Offload figure 2; forward and backward, merged, stay on the GPU
    ("param16", "forward-backward", 4),  # once for each of the two
    ("forward-backward", "grad16", 2),
    ("grad16", "update", 2),
    ("states", "update", 12),
    ("update", "states", 12),
    ("update", "float2half", 4),
    ("float2half", "param16", 2),
)
CPU_ADAM_S_PER_PARAM = 2.57 / 10e9  # ZeRO-Offload table 4
PEAK_FLOPS_PER_S = 70 * 10**12  # what ZeRO-Infinity takes as achievable on a V100


@dataclass(frozen=True)
class Cut:
    """What moves to the CPU, the bytes that cross, and the bytes that stay on the GPU."""

    on_cpu: tuple[str, ...]
    crossing: int  # bytes per parameter and step
    on_gpu: int  # bytes per parameter


def cut(*on_cpu: str) -> Cut:
    """One way to split the graph; forward and backward always stay on the GPU."""
    below = {one_of("Node", node, MOVABLE) for node in on_cpu}
    crossing = sum(weight for u, v, weight in EDGES if (u in below) != (v in below))
    on_gpu = sum(size for node, size in GPU_BYTES.items() if node not in below)
    return Cut(tuple(n for n in MOVABLE if n in below), crossing, on_gpu)


def cuts() -> tuple[Cut, ...]:
    """All splits that move something, the least crossing first, then the least left on the GPU.

    The first is ZeRO-Offload's: 4 bytes cross per parameter and 2 stay. Leaving the gradients on
    the GPU crosses as much and leaves 4; no split crosses less.
    """
    ways = (cut(*c) for k in range(1, 6) for c in combinations(MOVABLE, k))
    return tuple(sorted(ways, key=lambda way: (way.crossing, way.on_gpu)))


def derive_intensity(what: str) -> Derivation:
    """FLOPs per byte moved, ZeRO-Infinity §4.1; a step computes 8 FLOPs per parameter and token."""
    ci = sp.Symbol("ci", positive=True, integer=True)
    compute, params = 8 * b * s * Psi, 12 * L * h**2
    moved, reason = {
        "parameters and gradients": (8 * Psi, "three loads and one store of 2 bytes"),
        "optimizer states": (32 * Psi, "16 bytes read and 16 written"),
        "checkpoints": (4 * b * s * h * L / ci, "2bshL/ci bytes stored and loaded once"),
    }[one_of("State", what, ("parameters and gradients", "optimizer states", "checkpoints"))]
    work = compute.subs(Psi, params) if what == "checkpoints" else compute
    title, unit = f"Arithmetic intensity, {what}", "FLOPs per byte"
    start = Derivation(title, quotient(work, moved), reason, unit=unit)
    return start.then(sp.cancel(work / moved), "cancelled")


def efficiency(intensity: float, bytes_per_s: float, peak: int = PEAK_FLOPS_PER_S) -> sp.Rational:
    """Share of the peak without overlap, ZeRO-Infinity §4.1: ait·bw/(ait·bw + peak)."""
    fed = sp.Integer(whole("intensity", intensity, 1)) * whole("bytes_per_s", bytes_per_s, 1)
    return fed / (fed + whole("peak", peak, 1))


def bandwidth_for(share: sp.Rational, intensity: int, peak: int = PEAK_FLOPS_PER_S) -> sp.Rational:
    """Bytes/s that reach a share of the peak: `efficiency` solved for the bandwidth."""
    if not 0 < share < 1:
        raise ValueError(f"An efficiency lies between 0 and 1, and {share} does not.")
    return sp.nsimplify(share / (1 - share)) * peak / whole("intensity", intensity, 1)


def cpu_adam_s(params: float) -> float:
    """Seconds of one CPU-Adam step on one node at the paper's speed, 0.257 s per 1e9 parameters."""
    return whole("params", params) * CPU_ADAM_S_PER_PARAM


def disk_step_s(params: float, bytes_per_s: float, bytes_per_param: int = 16) -> float:
    """Seconds to read and to write all optimizer states once; 16 is what DeepSpeed's files hold."""
    return 2 * bytes_per_param * whole("params", params) / bytes_per_s


BLOCK = 4096  # what unbuffered reads and writes are multiples of
SCHEDULES = ("plain", "stream", "delayed")


@dataclass(frozen=True)
class Below:
    """What a rank holds in each tier between backward and step, and moves in a step; bytes.

    `cpu` has "temporary" too: room for what crosses, and for the disk two units. `files` hold every
    record twice, so that one of the two is whole at any moment.
    """

    gpu: dict[str, int]
    cpu: dict[str, int]
    down: int
    up: int
    files: int
    read: int
    written: int


def below(
    stage: int, ranks: int, params: float, units: Sequence[int] | None = None,
    recipe: str | Recipe = DEFAULT_RECIPE, optimizer_on: str = "cpu", parameters_on: str = "gpu",
    schedule: str = "plain", micro_batches: int = 1,
) -> Below:  # fmt: skip
    """Exact bytes with offload at stage 1, 2 or 3, all parameters trainable, padding included.

    "stream" sends gradients down after each backward, the others once; "delayed" keeps a step's
    gradients and new parameters below. Parameters below come up for each of two gathers.
    """
    n, r, late = whole("ranks", ranks, 1), recipe_named(recipe), schedule == "delayed"
    p, g, streamed = r.parameter, r.gradient, one_of("Schedule", schedule, SCHEDULES) == "stream"
    total = padded_params(params, units, n)
    shards = [-(-unit // n) for unit in units or [whole("params", params, 1)]]
    own, most, kept = total // n, max(shards), parameters_on == "gpu"
    room = (4 if g != 4 else 0) * most + (0 if late else (p + g) * most)
    files = read = written = 0
    for on, size, passes in ((optimizer_on, r.K, 1), (parameters_on, p, 2 * micro_batches)):
        if one_of("Tier", on, TIERS) == "nvme":
            records, head = sum(blocks(size * s) for s in shards), blocks(24 + 8 * len(shards))
            files, read = files + 2 * (records + head), read + passes * records
            room, written = (
                room + (2 if size == r.K else 1) * blocks(size * most),
                written + records,
            )
            written += head
    return Below(
        gpu={"parameters": p * (own if stage == 3 else total) * kept,
             "gradients": g * (total if stage == 1 else own) * (not streamed),
             "optimizer_states": r.K * own * (optimizer_on == "gpu")},
        cpu={"parameters": p * own * ((parameters_on == "cpu") + late),
             "gradients": g * own * (streamed or late),
             "optimizer_states": r.K * own * (optimizer_on == "cpu"), "temporary": room},
        down=g * own * (micro_batches if streamed else 1),
        up=p * own * (1 if kept else 2 * micro_batches), files=files, read=read, written=written,
    )  # fmt: skip


def blocks(num_bytes: int) -> int:
    """Bytes in whole blocks of the disk."""
    return -(-num_bytes // BLOCK) * BLOCK


def derive_crossing(streamed: bool = False, parameters_below: bool = False) -> Derivation:
    """Bytes over the edge of GPU and CPU per rank and step, 16-bit gradients and parameters."""
    parts = {"gradients down": 2 * (A if streamed else 1) * Psi / N_d}
    if parameters_below:
        parts |= dict.fromkeys(("up for forward", "up for backward"), 2 * A * Psi / N_d)
    else:
        parts["updated parameters up"] = 2 * Psi / N_d
    why = "after every backward" if streamed else "after the last backward"
    start = Derivation("Bytes over the edge", parts, f"gradients {why}", unit="bytes per rank")
    step = start.then(sp.factor(sum(parts.values())), "added up; over all ranks N_d times as much")
    once = streamed or parameters_below
    return step.substitute({A: sp.Integer(1)}, "one micro-batch") if once else step
