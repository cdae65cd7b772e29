"""Patients: stage 2 with one fault each, run on live ranks, and a chart of what can be seen.

A fault changes a line or two of the engine. The chart puts what four ranks showed beside what a
healthy engine shows on the same ranks: how the run ended, losses, weights, norms, bytes, calls.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zerolab.practice import data
from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.launcher.rank import namespace
from zerolab.practice.launcher.report import RankTimeout
from zerolab.practice.measure import digest
from zerolab.practice.meter import COLLECTIVES, KINDS, Meter, label
from zerolab.practice.norm import clip_scale
from zerolab.practice.reduction import GradientReduction
from zerolab.practice.sharding import shard_of
from zerolab.practice.stage2 import Stage2
from zerolab.practice.unit import Unit
from zerolab.practice.world import World

RANKS, STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 2, 0.1
MODEL = GPTConfig(width=20, layers=2, heads=2, tied=True)
OPTIONS = AdamWOptions(lr=1e-2, eps=1e-3)  # a large eps: AdamW hides no wrong scale behind it
HANGS_S = 2.0  # for ranks that wait for ever
NORMAL = {
    "end": "every rank comes to its end",
    "losses": "as many losses on each rank",
    "calls": "all ranks call the same collectives for the same units",
    "held": "a rank holds the bytes of stage 2",
    "sent": "a rank sends the bytes of stage 2",
    "padding": "the padding of the gradients is zero",
    "norm": "the norm of the gradients is the healthy one",
    "scale": "the update scales with the healthy factor",
    "weights": "the weights are the healthy ones on every rank",
}
"""What is seen of a run, the most telling first, and how that is for a healthy one."""
WRONG_ALIKE = "the weights are wrong, and the same on all ranks"

FAULTS: dict[str, dict[str, str]] = {
    "a rank skips a collective": {"end": "ranks wait in an all-gather that one never calls"},
    "a batch ends early on one rank": {
        "end": "ranks wait in a reduce-scatter that one never calls",
        "losses": "a loss fewer on one rank",
    },
    "another order on one rank": {
        "calls": "one rank calls them in another order", "norm": "the norm is another",
        "scale": "the factor is another, the same on all ranks", "weights": WRONG_ALIKE,
    },
    "the 1/N is forgotten": {
        "scale": "the factor is 4 times the healthy one", "weights": WRONG_ALIKE,
    },
    "the local norm is clipped": {
        "scale": "the factor differs from rank to rank", "weights": WRONG_ALIKE,
    },
    "whole gradients are kept": {"held": "a rank holds more gradients"},
    "gradients are all-reduced": {"sent": "a rank sends all-reduces"},
    "stale parameters are gathered": {"weights": "the weights differ from rank to rank"},
    "32-bit weights are gathered": {"sent": "the all-gathers send twice the bytes"},
    "padding leaks into the norm": {
        "padding": "the padding of the gradients is not zero", "norm": "the norm is another",
        "scale": "the factor is another, the same on all ranks", "weights": WRONG_ALIKE,
    },
    "tied weights are counted twice": {
        "scale": "the factor is another, the same on all ranks", "weights": WRONG_ALIKE,
    },
    "accumulation begins anew": {
        "norm": "the norm is another",
        "scale": "the factor is another, the same on all ranks", "weights": WRONG_ALIKE,
    },
}  # fmt: skip
"""Each fault, and what it shows that a healthy run does not."""

PATIENTS = sorted(FAULTS, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
"""Patient n has PATIENTS[n - 1]."""


@dataclass
class Record:
    """What one rank notes while it runs, as far as it comes; bytes, and calls as (name, unit)."""

    losses: list[float] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)  # of the own shards, after each backward
    padding: float = 0.0
    scales: list[float] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    weights: str = ""


class _Notes(Comm):
    """Notes each collective and the unit that it is for."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def note(self, call: str, unit: int) -> None:
        self.record.calls.append((call, ("embedding", "block 0", "block 1", "head")[unit]))


class _Reduction(GradientReduction):
    """The reduction of stage 2, without overlap, with a fault of the given name."""

    def __init__(self, units: list[Unit], comm: _Notes, fault: str) -> None:
        super().__init__(units, comm, overlap=False)
        self.notes, self.fault, self.units = comm, fault, units
        if fault == "another order on one rank" and comm.rank == 1:
            head, block1, block0, embedding = self.order
            self.order = [head, block0, block1, embedding]

    @torch.no_grad()
    def _send(self, unit: Unit) -> None:
        self.next += 1
        full, comm, fault = unit.grads(), self.notes, self.fault
        if fault == "padding leaks into the norm":
            full[unit.numel :] = 1.0
        comm.note("reduce", self.units.index(unit))
        shard = label(full.new_empty(unit.padded // comm.world_size), "gradients")
        if fault == "gradients are all-reduced":
            comm.all_reduce(full)
            shard.copy_(shard_of(full, comm.world_size, comm.rank))
        else:
            comm.reduce_scatter(shard, full)
        unit.drop_grads()
        if fault == "whole gradients are kept":
            unit.kept = full  # type: ignore[attr-defined]
        if unit.grad_shard is None or fault == "accumulation begins anew":
            unit.grad_shard = shard
        else:
            unit.grad_shard.add_(shard)


class _Patient(Stage2):
    """Stage 2 with a fault; "" is healthy."""

    def __init__(self, model: nn.Module, comm: _Notes, fault: str) -> None:
        super().__init__(model, comm, OPTIONS)
        self.notes, self.fault = comm, fault
        self.reduction = _Reduction(self.units, comm, fault)

    def scale(self, shards: list[Tensor]) -> float:
        n = self.comm.world_size
        if self.fault == "the local norm is clipped":
            own = math.sqrt(sum(float(shard.double().square().sum()) for shard in shards)) / n
            return min(1.0, MAX_NORM / (own + 1e-6)) / n
        if self.fault == "tied weights are counted twice":
            shards = [*shards, shards[0]]  # the table's unit, once more for the head
        scale = clip_scale(self.comm, shards, MAX_NORM, loss_scale=None)
        return scale * n if self.fault == "the 1/N is forgotten" else scale

    @torch.no_grad()
    def step(self, max_norm: float | None = None, loss_scale: float | None = None) -> None:
        scale = self.scale([unit.own_grads() for unit in self.units])
        self.notes.record.scales.append(scale)
        for place, unit in enumerate(self.units):
            unit.adamw.update(unit.own_grads(), scale)
            unit.grad_shard = None
            last = place == len(self.units) - 1 and len(self.notes.record.scales) == STEPS
            if self.fault == "a rank skips a collective" and self.comm.rank == 2 and last:
                continue
            self.notes.note("gather", place)
            if self.fault == "stale parameters are gathered":
                self.comm.all_gather(unit.full_params, unit.param_shard)
                unit.param_shard.copy_(unit.adamw.master)
            elif self.fault == "32-bit weights are gathered":
                whole = torch.empty(unit.padded)
                self.comm.all_gather(whole, unit.adamw.master)
                unit.full_params.copy_(whole)
            else:
                unit.param_shard.copy_(unit.adamw.master)
                self.comm.all_gather(unit.full_params, unit.param_shard)


def _train(fault: str) -> None:
    """Runs on a rank; what it notes stays there, however the run ends."""
    record = namespace()["record"] = Record()
    comm, model = _Notes(record), GPT(MODEL)
    batches = STEPS * MICRO_BATCHES
    if fault == "a batch ends early on one rank" and comm.rank == 3:
        batches -= 1
    with Meter() as meter:
        engine = _Patient(model, comm, fault)
        for at in range(batches):
            if at % MICRO_BATCHES == 0:
                meter.sent.clear()
            loss = model.loss(*data.batch(at, comm.rank, comm.world_size))
            record.losses.append(loss.item())
            engine.backward(loss / MICRO_BATCHES)
            del loss
            own = [unit.own_grads() for unit in engine.units]
            record.squares.append(sum(float(g.double().square().sum()) for g in own))
            ends = [max(0, min(len(g), (comm.rank + 1) * len(g) - unit.numel))
                    for g, unit in zip(own, engine.units, strict=True)]  # fmt: skip
            tails = [g[len(g) - n :].abs().sum() for g, n in zip(own, ends, strict=True)]
            record.padding += float(sum(tails))
            if at % MICRO_BATCHES == MICRO_BATCHES - 1:
                del own, tails
                record.held = meter.held()
                engine.step()
                record.sent = meter.sent_bytes()
    record.weights = digest(torch.cat([p.detach().flatten() for p in model.parameters()]))


def _noted() -> Record:
    return namespace()["record"]


@dataclass(frozen=True)
class Run:
    """How a run ended ("" for well, else who waits where), and what each rank noted."""

    waits: str
    ranks: list[Record]

    def norms(self) -> list[float]:
        """The global norm of the mean gradient after each micro-batch that all ranks saw."""
        each = zip(*(r.squares for r in self.ranks), strict=False)
        return [math.sqrt(sum(squares)) / RANKS for squares in each]


def run_fault(world: World, fault: str) -> Run:
    """Trains with a fault on four ranks ("" for none). Ranks that wait for ever are freed."""
    hangs = "end" in FAULTS.get(fault, {})
    limit_s = HANGS_S if hangs else world.timeout
    while True:
        waits = ""
        try:
            world.run(_train, fault, timeout=limit_s)
        except RankTimeout as error:
            waits = str(error).partition(": ")[2].partition(" (")[0]
            if "running" in waits and limit_s < world.timeout:  # it is slow: it has not got there
                limit_s *= 2
                continue
        return Run(waits, world.run(_noted))


def seen(healthy: Run, run: Run) -> dict[str, str]:
    """What is wrong with a run, in the words of NORMAL and FAULTS, by what it is seen in."""
    wrong: dict[str, str] = {}
    if run.waits:
        where = "an all-gather" if "all_gather" in run.waits else "a reduce-scatter"
        wrong["end"] = f"ranks wait in {where} that one never calls"
        if len({len(r.losses) for r in run.ranks}) > 1:
            wrong["losses"] = "a loss fewer on one rank"
        return wrong  # what came after is cut off
    well, ill = healthy.ranks, run.ranks
    if len({tuple(r.calls) for r in ill}) > 1:
        wrong["calls"] = "one rank calls them in another order"
    if ill[0].held["gradients"] > well[0].held["gradients"]:
        wrong["held"] = "a rank holds more gradients"
    if ill[0].sent["all_reduce"]:
        wrong["sent"] = "a rank sends all-reduces"
    elif ill[0].sent["all_gather"] == 2 * well[0].sent["all_gather"]:
        wrong["sent"] = "the all-gathers send twice the bytes"
    if any(r.padding for r in ill):
        wrong["padding"] = "the padding of the gradients is not zero"
    pairs = list(zip(run.norms()[:MICRO_BATCHES], healthy.norms(), strict=False))
    if not all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs):
        wrong["norm"] = "the norm is another"
    factors = [r.scales[0] / h.scales[0] for r, h in zip(ill, well, strict=True)]
    if max(factors) > 1.001 * min(factors):
        wrong["scale"] = "the factor differs from rank to rank"
    elif math.isclose(factors[0], RANKS, rel_tol=1e-3):
        wrong["scale"] = "the factor is 4 times the healthy one"
    elif not math.isclose(factors[0], 1, rel_tol=1e-3):
        wrong["scale"] = "the factor is another, the same on all ranks"
    if len({r.weights for r in ill}) > 1:
        wrong["weights"] = "the weights differ from rank to rank"
    elif ill[0].weights != well[0].weights:
        wrong["weights"] = WRONG_ALIKE
    return wrong


@dataclass(frozen=True)
class Chart:
    """What a patient showed, beside a healthy run of the same ranks; shown as a table."""

    number: int
    healthy: Run
    run: Run

    def __repr__(self) -> str:
        titles = [(f"patient {self.number}", "healthy", "this patient")]
        pairs = zip(_rows(self.healthy, self.healthy), _rows(self.run, self.healthy), strict=True)
        rows = titles + [(name, well, ill) for (name, well), (_, ill) in pairs]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        under = "\n" + " " * (sum(widths) + 4)  # a hang is told in two lines: pages are narrow
        lines = [
            f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c.replace('; ', under)}" for a, b, c in rows
        ]
        usual = Counter(tuple(r.calls) for r in self.run.ranks).most_common(1)[0][0]
        for rank, record in enumerate(self.run.ranks):
            if tuple(record.calls) != usual:
                lines.append(f"rank {rank} {_first_difference(record.calls, usual)}")
        return "\n".join(lines)


def _rows(run: Run, healthy: Run) -> list[tuple[str, str]]:
    """What is measured of a run, as text."""
    first, names = run.ranks[0], {healthy.ranks[0].weights: "H", "": "-"}
    letters = [names.setdefault(r.weights, "abcd"[len(names) - 2]) for r in run.ranks]
    factors = [r.scales[0] * RANKS for r in run.ranks]
    padding = "not zero" if any(r.padding for r in run.ranks) else "zero"
    return [
        ("how it ends", run.waits or "well"),
        ("losses noted, by rank", " ".join(str(len(r.losses)) for r in run.ranks)),
        ("last loss, by rank", " ".join(f"{r.losses[-1]:.1f}" for r in run.ranks)),
        ("weights, by rank (H: healthy)", " ".join(letters)),
        ("norm after micro-batches 1, 2", " ".join(f"{x:.2g}" for x in run.norms()[:2])),
        ("N times the factor, by rank", " ".join(f"{x:.2g}" for x in factors)),
        ("padding in the gradients", padding),
        *((f"held: {kind.replace('_', ' ')}", f"{first.held[kind]:,}") for kind in KINDS),
        *((f"sent in a step: {name.replace('_', ' ')}", f"{first.sent[name]:,}")
          for name in COLLECTIVES),
    ]  # fmt: skip


def _first_difference(calls: list[tuple[str, str]], usual: tuple[tuple[str, str], ...]) -> str:
    for place, (call, other) in enumerate(zip(calls, usual, strict=False)):
        if call != other:
            return f"calls {' '.join(call)} where most call {' '.join(other)}, in place {place + 1}"
    return (
        f"makes {len(calls)} calls, most have begun {len(usual)}; the last is {' '.join(usual[-1])}"
    )


class Ward:
    """The patients' ranks: `ward.chart(3)` runs patient 3 and a healthy engine beside it."""

    def __init__(self, world: World) -> None:
        if world.size != RANKS:
            raise ValueError(f"Patients need {RANKS} ranks: give a World({RANKS}).")
        self.world = world
        self._healthy: Run | None = None

    def chart(self, number: int) -> Chart:
        """Runs a patient, 1 to 12; ValueError for any other number."""
        if number not in range(1, len(PATIENTS) + 1):
            raise ValueError(f"There is no patient {number!r}: choose one of 1 to {len(PATIENTS)}.")
        self._healthy = self._healthy or run_fault(self.world, "")
        return Chart(number, self._healthy, run_fault(self.world, PATIENTS[number - 1]))
