"""Published figures beside ours: papers, the lecture's exercises, public reports.

Each row agrees when ours, rounded as the source rounds, has the same printed digits. What cannot be
derived, or is wrong at its source, is in `EXCLUDED` with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy as sp

from zerolab.course.compare import deepspeed_gpu_bytes, deepspeed_host_bytes
from zerolab.course.partition import even_shards, greedy_shards, row_shards
from zerolab.theory import offload as off
from zerolab.theory.catalog import MODELS, model
from zerolab.theory.memory import RECIPES, derive_limit, held_bytes, padding
from zerolab.theory.notation import A, G, N_d, Psi, S, W
from zerolab.theory.plan import plan
from zerolab.theory.precision import BF16
from zerolab.theory.residual import activation_bytes, fused_buffer, gathered_bytes
from zerolab.theory.strategy import Strategy
from zerolab.theory.traffic import (
    HYBRID,
    derive_accumulation,
    derive_ratio,
    derive_ring,
    ring_time_s,
    sent,
    sent_bytes,
)

GB, GIB, MIB, TIB = 10**9, 2**30, 2**20, 2**40
Q = sp.Rational
OFFLOADED = ("optimizer", "both")


def as_printed(value: float | sp.Expr, printed: str, cut_whole: bool = False) -> str:
    """`value` with as many decimals as `printed`: half up; `cut_whole` cuts whole numbers off."""
    digits = len(printed.partition(".")[2])
    scaled = Q(value) * 10**digits + (0 if cut_whole and not digits else Q(1, 2))
    return f"{int(sp.floor(scaled)) / 10**digits:.{digits}f}"


@dataclass(frozen=True)
class Oracle:
    """One published line: numbers as printed, and ours in the same order and unit."""

    source: str
    what: str
    published: str
    ours: tuple[float | sp.Expr, ...]
    cut_whole: bool = False

    @property
    def printed(self) -> str:
        pairs = zip(self.ours, self.published.split(), strict=True)
        return " ".join(as_printed(value, text, self.cut_whole) for value, text in pairs)

    @property
    def agrees(self) -> bool:
        return self.printed == self.published


def delayed(weight: sp.Rational, lr: sp.Rational, steps: int, delay: int = 1) -> list[sp.Rational]:
    """Gradient descent on w² with the gradient of `delay` steps ago (ZeRO-Offload §5.2).

    The first `delay` steps have no gradient to use and change nothing.
    """
    path = [weight]
    for step in range(steps):
        gradient = 2 * path[step - delay] if step >= delay else 0
        path.append(path[-1] - lr * gradient)
    return path[1:]


def held_gb(params: float, ranks: int, *stages: int, recipe: str = "adamw-mixed") -> tuple:
    return tuple(Q(held_bytes(st, ranks, params, recipe)["total"], GB) for st in stages)


TABLE_1 = {  # ZeRO table 1: 7.5B, 128B and 1T at stages 1, 2, 3
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}
FIGURE_2A = (  # ZeRO-Infinity: layers, hidden/1024, heads; then as printed
    (80, 10, 128, "0.10 1.83 2.03 0.05 1.63"),
    (100, 20, 160, "0.50 9.16 3.91 0.12 2.50"),
    (128, 25, 256, "1.01 18.31 7.13 0.20 3.56"),
    (195, 64, 512, "10.05 182.81 24.38 0.76 8"),
    (315, 160, 1024, "101.47 1845.70 88.59 3.08 18"),
)
EXCLUDED = (
    ("ZeRO-Offload table 1, last row", "prints 4M beside 8x: 2M is meant"),
    ("ZeRO-Offload, 284 GB for 17.2B", "16 bytes give 275; the figure is second-hand"),
    ("ZeRO-Offload, L2L moves 28M", "the schedule of the other system is not modelled"),
    ("ZeRO-Offload and ZeRO-Infinity, TFLOPS and largest models", "measured, not derived"),
    ("ZeRO-Infinity figure 2a, 1.95 GB in row 1", "contradicts 16h², which gives 1.56 GiB"),
    ("ZeRO-Infinity, nearly 1.5 TB/s for 90 %", "the formula gives 1.23, and 91.6 % at 1.5"),
    ("ZeRO-Infinity table 3", "a scaling of one measured column"),
    ("ZeRO §6.1, 33 GB of checkpoints for 100B", "the count of elements; 67.1 GB in bytes"),
    ("FSDP §3.2.2, 2M(W-1)/(GW)", "the ring gives 2M(W-G)/(GW)"),
    ("cases A9, A12, A17", "no confirmed cause: an allocator's cache, buffers, activations"),
    ("ZeRO-Offload table 4, seconds of Adam", "measured; its 10B row is the planner's speed"),
    ("ZeRO table 2, rows MP=2 to 16", "the rounded first row, times MP"),
    ("ZeRO §6.1, 6.2B are 82 % of 7.6B", "a measurement over a printed figure"),
    ("cases B8, E4", "arithmetic on their inputs alone, which nothing of ours computes"),
    ("cases without a figure", "explanations of behaviour, for lessons and checks"),
)


def _papers() -> list[Oracle]:
    rows = [Oracle("ZeRO table 1", f"GB, {billions}B, N={n}, stages 1 to 3", printed,
                   held_gb(float(billions) * GB, n, 1, 2, 3), True)
            for n, cells in TABLE_1.items()
            for billions, printed in zip(("7.5", "128", "1000"), cells, strict=True)]  # fmt: skip
    for layers, kilo, heads, printed in FIGURE_2A:
        h, params, tokens = kilo * 1024, 12 * layers * (kilo * 1024) ** 2, 1024
        working = 16 * h + 2 * heads * tokens  # bytes of one token in one layer
        ours = (Q(params, 10**12), Q(20 * params, TIB), Q(64 * tokens * working * layers, TIB),
                Q(activation_bytes(layers, h, heads, tokens, 32, "full"), TIB),
                Q(4 * tokens * working, GIB))  # fmt: skip
        what = f"{printed.split()[0]}T: params/T, states, activations (64), checkpoints TiB; GiB"
        rows.append(Oracle("ZeRO-Infinity figure 2a", what, printed, ours))
    first = [Q(32) / x for x in (16, 4 + Q(12, 64), 2 + Q(14, 64), Q(16, 64))]
    gpt2 = (48, 1600, 25, 1024, 32)
    gpu = [off.cut(*on).on_gpu for on in ((), ("grad16",), ("states", "update", "float2half"))]
    return [
        *rows,
        Oracle("ZeRO table 1", "GB without sharding", "120 2048 16000",
               tuple(held_gb(x, 1, 0)[0] for x in (7.5e9, 128e9, 1e12))),
        Oracle("ZeRO figure 1", "GB, 7.5B, N=64", "120.0 31.4 16.6 1.9",
               held_gb(7.5e9, 64, 0, 1, 2, 3)),
        Oracle("ZeRO table 2", "largest B in 32 GB, N=64", "2 7.6 14.4 128", tuple(first)),
        Oracle("ZeRO §3.1", "GB of states, 1.5B", "24", held_gb(1.5e9, 1, 0)),
        Oracle("ZeRO §3.2", "GB of activations, GPT-2 1.5B, ZeRO and Korthikanti", "60 287",
               tuple(Q(activation_bytes(*gpt2, "none", f), GB) for f in ("zero", "korthikanti"))),
        Oracle("ZeRO §3.2", "GB of checkpoints, 1.5B; GB and GiB, 100B", "5.03 67.1 62.5",
               (Q(activation_bytes(*gpt2, "full"), GB),
                *(Q(activation_bytes(125, 8192, 64, 1024, 32, "full"), u) for u in (GB, GIB)))),
        Oracle("ZeRO §3.2", "GB of fused buffers, 3B and 1.5B", "12 6",
               tuple(Q(fused_buffer(x * 10**8).high, GB) for x in (30, 15))),
        Oracle("Korthikanti", "GPT-3: GB a layer, GB in all at b=1", "2.87 275",
               tuple(Q(activation_bytes(n, 12288, 96, 2048), GB) for n in (1, 96))),
        Oracle("ZeRO-Offload §3", "bytes crossing; held; times", "4 16 14 4 2 1.14 8",
               (off.cuts()[0].crossing, *gpu, off.cuts()[0].on_gpu, Q(16, 14), Q(16, 2))),
        Oracle("ZeRO-Offload", "GB of states at 8, 11, 17.2B", "128 176 275",
               tuple(held_gb(x, 1, 0)[0] for x in (8e9, 11e9, 17.2e9))),
        Oracle("ZeRO-Infinity figure 2a", "GiB, largest operator, rows 2 to 5", "6.25 9.77 64 400",
               tuple(Q(16 * (k * 1024) ** 2, GIB) for k in (20, 25, 64, 160))),
        Oracle("ZeRO-Infinity §4", "percent; GB/s for states, params", "50.6 273 68",
               (100 * off.efficiency(1024, 70e9), off.bandwidth_for(Q(1, 2), 256) / GB,
                off.bandwidth_for(Q(1, 2), 1024) / GB)),
        Oracle("ZeRO-Infinity §4", "TB/s, 90 %; percent at 1.5; checkpoints", "1.23 91.6 58",
               (off.bandwidth_for(Q(9, 10), 512) / 10**12, 100 * off.efficiency(512, 1.5e12),
                100 * off.efficiency(24 * 2048, 2e9))),
    ]  # fmt: skip


def _exercises() -> list[Oracle]:
    def ms(stage: int, size: float, ring: bool = True) -> sp.Expr:
        papers = sum(sent(stage).values()) * size / Psi
        return Q(sent_bytes(stage, 8, size)["total"] if ring else papers) / (400 * GB) * 1000

    sizes = (("1", "8.75 13.125 15"), ("7", "61.25 91.875 105"), ("13", "113.75 170.625 195"),
             ("70", "612.5 918.75 1050"))  # fmt: skip
    speed, big, swap_s = Q(400 * GB), 175 * 10**9, off.disk_step_s(175e9, 25e9, 12)
    layer, ckpt = MODELS["gpt3-175b"].units[1], activation_bytes(96, 12288, 96, 2048, 1, "full")
    return [
        Oracle("exercise 1", "GB, 13B, N=8", "208 71.5 48.75 26", held_gb(13e9, 8, 0, 1, 2, 3)),
        Oracle("exercise 2", "times data parallelism", "1.5", (derive_ratio(3).result,)),
        *(Oracle("exercise 3", f"ms, {b}B: DP, ZeRO-3, without (N-1)/N", text,
                 (ms(0, int(b) * GB), ms(3, int(b) * GB), ms(3, int(b) * GB, False)))
          for b, text in sizes),
        Oracle("exercise 3", "ms, 7B: serial", "191.9", (100 + ms(3, 7 * GB),)),
        Oracle("exercise 3", "B at break-even: ZeRO-3, large N, DP", "7.62 6.67 11.43",
               tuple(speed / 10 / v / GB for v in (6 * Q(7, 8), 6, 4 * Q(7, 8)))),
        Oracle("exercise 3", "tokens in 100 ms, 7B", "371", (Q(312 * 10**12, 20) / (42 * GB),)),
        Oracle("exercise 4", "GB: all, parameters, optimizer; GPUs", "2800 350 2100 35",
               (*held_gb(big, 1, 0), Q(2 * big, GB), Q(12 * big, GB), Q(16 * big, 80 * GB))),
        Oracle("exercise 4", "GB/GPU: parameters; with gradients", "43.75 87.5",
               (Q(2 * big, 8 * GB), Q(4 * big, 8 * GB))),
        Oracle("exercise 4", "GB of host by DeepSpeed's rule", "4200 4725",
               tuple(Q(deepspeed_host_bytes(3, big, 8, offload=o), GB) for o in OFFLOADED)),
        Oracle("exercise 4", "GB of checkpoints; B and GB of a layer", "4.83 1.81 3.62",
               (Q(ckpt, GB), Q(layer, GB), Q(2 * layer, GB))),
        Oracle("exercise 4", "s of disk; full duplex; thousand tokens", "168 84 576",
               (swap_s, swap_s / 2, Q(4 * swap_s) * 8 * 150 * 10**12 / (8 * big) / 1000)),
        Oracle("exercise 5", "GB, 7B, N=4: stages 3, 2; SHARD_GRAD_OP peak", "28 38.5 42",
               (*held_gb(7e9, 4, 3, 2), held_gb(7e9, 4, 3)[0] + 14)),
    ]  # fmt: skip


def _cases() -> list[Oracle]:
    def plan_gb(kind: str, **how) -> sp.Expr:
        return Q(plan(7.02e9, 8, Strategy(3, "fsdp2-mixed", frozen=7 * GB, **how)).held[kind], GB)

    a1 = 6805 * 10**6, 4, 131 * 10**6
    a2, table, unit = 50400 * 4096, 248320 * 5120, [9216**2] * 40
    half, full = (held_bytes(stage, 2, 1436e6, "adamw-fp32") for stage in (3, 0))
    return [
        Oracle("case A1", "GiB: none, optimizer, both; host", "29.01 3.66 0.49 152.1 171.1",
               (*(Q(deepspeed_gpu_bytes(3, *a1, o), GIB) for o in ("none", *OFFLOADED)),
                *(Q(deepspeed_host_bytes(3, a1[0], 4, offload=o), GIB) for o in OFFLOADED))),
        Oracle("case A2", "GiB at 2 and 4 GPUs", "0.77 0.77",
               tuple(Q(deepspeed_gpu_bytes(3, 6 * GB, n, a2, "both"), GIB) for n in (2, 4))),
        Oracle("case A4", "GiB: paper, code, docs", "9.96 11.28 15.93",
               (held_gb(2851e6, 8, 2)[0] * GB / GIB,
                *(Q(deepspeed_gpu_bytes(2, 2851 * 10**6, 8, docs=d), GIB) for d in (False, True)))),
        Oracle("case A7", "times, stage 1, N=4", "2.29",
               (derive_limit(1).steps[1].expr.subs(N_d, 4),)),
        Oracle("case A9", "GB, stages 3 and 2, N=8 and N=2", "14 26.25 56 63",
               held_gb(7e9, 8, 3, 2) + held_gb(7e9, 2, 3, 2)),
        Oracle("case A10", "MB of states; most saved at N=4", "200 150",
               tuple(x * 1000 for x in (held_gb(12.5e6, 4, 0, recipe="adamw-fp32")[0],
                                        held_gb(12.5e6, 4, 0, recipe="adamw-fp32")[0]
                                        - held_gb(12.5e6, 4, 3, recipe="adamw-fp32")[0]))),
        Oracle("case A11", "B in one unit; GB whole", "3.40 13.6",
               (Q(sum(unit), GB), Q(gathered_bytes([sum(unit)], RECIPES["adamw-fp32"], 0), GB))),
        Oracle("case A13", "MiB: a shard, both, unsharded", "2739 5478 10956",
               (Q(half["gradients"], MIB), *(Q(h["parameters"] + h["gradients"], MIB)
                                             for h in (half, full)))),
        Oracle("case A15", "MiB: parameters, a moment, over 2, over 8", "237 474.8 237.4 59.4",
               tuple(Q(held_bytes(1, n, 124475904, "fsdp2-mixed")["optimizer_states"], k * MIB)
                     for k, n in ((4, 1), (2, 1), (2, 2), (2, 8)))),
        Oracle("case A16", "B; GiB; apart", "10171187200 9.47 4.74",
               (both := gathered_bytes([2 * table], RECIPES["adamw-fp32"], 0), Q(both, GIB),
                Q(gathered_bytes([table, table], RECIPES["adamw-fp32"], 0), GIB))),
        Oracle("case B1", "M inbound, 4 nodes: gather, step", "0.75 2.25",
               (derive_ring("all_gather").result.subs({S: 1, N_d: 4}), HYBRID["full"].subs(W, 4))),
        Oracle("case B2", "Ψ with A=4: stages 1, 2, 3", "2 5 12",
               tuple(derive_accumulation(k).result.subs({A: 4, Psi: 1}) for k in (1, 2, 3))),
        Oracle("case B4", "w: three plain steps, four delayed", "0.8 0.64 0.512 1.0 0.8 0.6 0.44",
               (*delayed(Q(1), Q(1, 10), 3, 0), *delayed(Q(1), Q(1, 10), 4, 1))),
        Oracle("case B5", "GB; ms at 300, at 235; GB/s seen", "8.75 29 37 21",
               (Q("8.75"), *(ring_time_s("all_gather", 10 * GB, 8, bw * GB, 0) * 1000
                             for bw in (300, 235)), Q("8.75") / Q("0.42"))),
        Oracle("case B6", "M across hosts, 16 ranks, 8 a host: hybrid, full", "0.125 2.8125",
               tuple(HYBRID[how].subs({W: 16, G: 8}) for how in ("hybrid", "full"))),
        Oracle("case B7", "GB a step at N=2, N=4; s at 10 Gb/s", "4.5 6.75 5.4",
               (*(Q(sent_bytes(3, n, 1.5e9)["total"], GB) for n in (2, 4)), Q("6.75") * 8 / 10)),
        Oracle("case B12", "times, explained by volume", "1.5", (derive_ratio(3).result,)),
        Oracle("case C2", "GB of host: at start, steady", "336 112",
               (Q(deepspeed_host_bytes(2, 7 * GB, 8, at_start=True), GB), held_gb(7e9, 1, 0)[0])),
        Oracle("case C3", "GB a node, 10B over 2", "80",
               (Q(held_bytes(3, 2, 1e10, "zero-infinity")["optimizer_states"], GB),)),
        Oracle("case C5", "s per 1B parameters at 3 GB/s", "10.7", (off.disk_step_s(1e9, 3e9),)),
        Oracle("case C7", "s for 18B a node", "4.6", (off.cpu_adam_s(18e9),)),
        Oracle("case D2", "padded; real elements", "60 30 27",
               (57 + padding(57, 4), *even_shards(57, 2, 2))),
        Oracle("case D4", "elements", "16 16", even_shards(8 + 0 + 24, 2)),
        Oracle("case D5", "per rank; pads; per rank of a group of 16", "1 2016 128",
               (even_shards(32, 2048)[0], padding(32, 2048),
                (32 + padding(32, 2048)) // 16)),
        Oracle("case D7", "elements", "1 1 0 0", even_shards(2, 4)),
        Oracle("case D8", "idle ranks, 5 parameters over 8", "3",
               (greedy_shards([10, 20, 30, 40, 50], 8).count(0),)),
        Oracle("FSDP2, dim 0", "rows: 5, 9 and 1 over 4", "2 2 1 0 3 3 3 0 1 0 0 0",
               row_shards(5, 4) + row_shards(9, 4) + row_shards(1, 4)),
        Oracle("ZeroRedundancyOptimizer", "moments and a counter: ranks 0, 1", "20001 201",
               tuple(2 * n + 1 for n in greedy_shards([10**4, 100, 100, 100], 4)[:2])),
        Oracle("case D10", "B, a fair shard of 7B over 8", "0.875",
               (Q(even_shards(7 * GB, 8)[0], GB),)),
        Oracle("case D11", "bytes at N=1, stage 3", "16", (held_bytes(3, 1, 1)["total"],)),
        Oracle("case E1", "GB of gradients: frozen mixed in, apart", "3.51 0.01",
               tuple(plan_gb("gradients", frozen_apart=apart) for apart in (False, True))),
        Oracle("case E3", "M, a tied table once", "38.6",
               (Q(model("gpt2", tied=False).params - model("gpt2").params, 10**6),)),
        Oracle("case E5", "B: upcast, not upcast", "332032 166016",
               tuple(held_bytes(0, 1, 20752, r)["total"] for r in ("adamw-mixed", "adamw-bf16"))),
        Oracle("case E6", "B: separate fp32 master, shared", "201326592 134217728",
               tuple(held_bytes(0, 1, 16777216, r)["optimizer_states"]
                     for r in ("adamw-mixed", "adamw-fp32"))),
        Oracle("case F4", "1 + 2^-9 lost in bf16, yes is 1", "1", (int(BF16.absorbs(Q(1, 512))),)),
    ]  # fmt: skip


def rows() -> list[Oracle]:
    """All published figures that can be derived, beside ours."""
    return [*_papers(), *_exercises(), *_cases()]


def disagreements(table: Sequence[Oracle] | None = None) -> list[Oracle]:
    return [row for row in (rows() if table is None else table) if not row.agrees]
