"""Derived beside counted for models that no laptop holds, on ranks that are not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerolab.course.columns import derived_and_counted, held_and_sent
from zerolab.course.compare import compare
from zerolab.course.partition import row_shards
from zerolab.practice.architectures import architecture
from zerolab.practice.dry_run import DRY_PEERS, DryCount, DryJob, dry_count
from zerolab.practice.measure import STAGES
from zerolab.practice.precision import precision_of
from zerolab.theory.memory import held_bytes
from zerolab.theory.traffic import sent_bytes
from zerolab.theory.values import one_of, whole

KINDS = ("parameters", "gradients", "optimizer_states", "total")
NOT_SENT = "nothing is sent in a dry run"


@dataclass(frozen=True)
class DryComparison:
    """One dry run; bytes per rank, as counted on `rank`, sent ones per step.

    The keys of `zerolab.course.measure.Comparison` have the same meaning here; what a dry run
    cannot know is None.

    times_fair     what is held over a fair N-th of 16 (or the recipe's) bytes a parameter
    empty_shards   units (a peer: parameters) of which the last rank owns nothing
    uneven         a peer: the numbers of rows that N does not divide, see `Uneven`
    peak_by_kind   what the peak was made of, as `peak_by` names it
    peak_by_module the peak inside each unit's forward and backward
    """

    stage: int | None
    peer: str | None
    model: str
    ranks: int
    rank: int
    recipe: str
    steps: int
    params: int
    padding: int
    empty_shards: int
    uneven: list[Uneven]
    held_bytes: dict[str, dict[str, int]]
    times_fair: float
    sent_bytes: dict[str, dict[str, int]]
    control_bytes: int
    wire_bytes: None
    wire_reason: str
    peak_bytes: int
    peak_by_kind: dict[str, int]
    peak_by: str
    peak_by_module: dict[str, int]
    equal: bool
    same_weights_as_one_process: None = None
    bitwise: None = None
    dry_run: bool = True

    @property
    def agrees(self) -> bool:
        """The counted bytes are the derived ones."""
        return self.equal

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain numbers and strings, for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """Tables for people."""
        what = self.peer or f"stage {self.stage}"
        lines = [
            (
                f"{what} on {self.ranks:,} ranks, {self.model}: {self.params:,} parameters "
                f"(+ {self.padding:,} padding), recipe {self.recipe}"
            ),
            f"a dry run, counted as rank {self.rank:,}",
            f"empty shards of the last rank: {self.empty_shards:,}",
            "",
            *derived_and_counted(
                "bytes per rank", held_and_sent(self.held_bytes, self.sent_bytes), digits=20
            ),
        ]
        lines += ["", f"held: {self.times_fair:.5f} of an N-th of the whole"]
        lines += [f"  {row}" for row in self.uneven]
        lines += ["", f"peak inside a step, {self.peak_bytes:,} bytes ({self.peak_by}):"]
        for kind, size in sorted(self.peak_by_kind.items(), key=lambda item: -item[1]):
            lines.append(f"  {kind.replace('_', ' '):<28}{size:>20,}")
        lines.append("peaks by module, the highest first:")
        for name, size in sorted(self.peak_by_module.items(), key=lambda item: -item[1])[:5]:
            lines.append(f"  {name:<28}{size:>20,}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Uneven:
    """Parameters of `rows` rows, which N does not divide: a rank of N gets ceil(rows / N).

    `bytes_over_share` is what rank 0 holds of them beyond an N-th.
    """

    rows: int
    params: int
    rows_per_rank: int
    bytes_over_share: int
    ranks: int

    def __str__(self) -> str:
        share = self.rows / self.ranks
        return (
            f"{self.rows:,} rows are {share:.3f} a rank: rank 0 gets {self.rows_per_rank}, "
            f"{self.bytes_over_share:,} bytes over its share of {self.params:,} parameters"
        )


def dry_measure(
    model: str,
    ranks: int,
    stage: int | None = None,
    peer: str | None = None,
    recipe: str = "adamw-mixed",
    rank: int = 0,
    **more: Any,
) -> DryComparison:
    """Counts one step of a stage, or of a peer, and holds it against what is derived.

    `more` are further fields of `zerolab.practice.dry_run.DryJob`. ValueError, in one sentence,
    for what cannot be run, RuntimeError where this torch lacks what a dry run needs.
    """
    whole("ranks", ranks, 1)
    for name in {"tokens", "micro_batches"} & set(more):
        whole(name, more[name], 1)
    if not 0 <= rank < ranks:
        raise ValueError(f"There is no rank {rank} among {ranks}: the last is {ranks - 1}.")
    built = architecture(model)
    more.setdefault("tokens", min(DryJob.tokens, built.context))
    if peer is None:
        one_of("Stage", stage, STAGES)
        precision_of(recipe)
        for option, first in (("overlap", 2), ("prefetch", 3)):
            if more.get("engine", {}).get(option) and (stage or 0) < first:
                raise ValueError(f"Stage {stage} has no {option}: it begins with stage {first}.")
    else:
        recipe = "fsdp2-mixed"  # fp32 shards, computing and reducing in 16 bits
    job = DryJob(built, ranks, stage or 0, peer, rank, recipe, **more)
    seen = dry_count(job)
    held, sent = _derived_peer(job, seen) if peer else _derived_stage(job, seen)
    counted = {kind: seen.held[kind] for kind in KINDS if kind != "total"}
    counted |= {"total": sum(counted.values())}
    counted_sent = {name: seen.sent.get(name, 0) for name in sent}
    all_sent = seen.sent["total"] == sent["total"]
    besides = seen.held["total"] - counted["total"]
    steps = 4 * len(seen.shapes) if peer else 0  # torch's AdamW counts each parameter's steps
    bytes_of = recipe if peer else precision_of(recipe).bytes_of
    whole_bytes = held_bytes(0, 1, seen.params, bytes_of)["total"]
    return DryComparison(
        stage=None if peer else job.stage,
        peer=peer,
        model=built.name,
        ranks=ranks,
        rank=rank,
        recipe=recipe,
        steps=1,
        params=seen.params,
        padding=seen.padding,
        empty_shards=seen.empty_shards,
        uneven=_uneven(seen.shapes, ranks) if peer else [],
        held_bytes={"predicted": held, "measured": counted},
        times_fair=counted["total"] * ranks / whole_bytes,
        sent_bytes={"predicted": sent, "measured": counted_sent},
        control_bytes=seen.sent["control"],
        wire_bytes=None,
        wire_reason=NOT_SENT,
        peak_bytes=seen.peak,
        peak_by_kind=seen.peak_by_kind,
        peak_by=seen.peak_by,
        peak_by_module=seen.modules,
        equal=counted == held and counted_sent == sent and all_sent and besides == steps,
    )


def _derived_stage(job: DryJob, seen: DryCount) -> tuple[dict[str, int], dict[str, int]]:
    recipe = precision_of(job.recipe).bytes_of
    shape = (job.stage, job.ranks, seen.params, recipe, seen.units)
    return held_bytes(*shape), sent_bytes(*shape, job.micro_batches)


def _derived_peer(job: DryJob, seen: DryCount) -> tuple[dict[str, int], dict[str, int]]:
    """fully_shard's bytes: rows, not elements, are dealt out, and buffers have rank 0's size."""
    rank_0 = sum(_rows(shape, job.ranks, 0) for shape in seen.shapes)
    own = sum(_rows(shape, job.ranks, job.rank) for shape in seen.shapes)
    sizes = {"parameters": 4 * rank_0, "gradients": 4 * rank_0, "optimizer_states": 8 * own}
    padded = rank_0 * job.ranks
    schedule = "shard-grad-op" if not DRY_PEERS[str(job.peer)] else 3
    sent = sent_bytes(schedule, job.ranks, padded, job.recipe, None, job.micro_batches)
    return {**sizes, "total": sum(sizes.values())}, sent


def _rows(shape: Sequence[int], ranks: int, rank: int) -> int:
    """Elements of one parameter that a rank owns under fully_shard."""
    numel = 1
    for length in shape[1:]:
        numel *= length
    return row_shards(shape[0], ranks)[rank] * numel


def _uneven(shapes: Sequence[Sequence[int]], ranks: int) -> list[Uneven]:
    """Where a rank holds more than its share, the heaviest first."""
    params: Counter[int] = Counter()
    over: Counter[int] = Counter()
    for shape in shapes:
        own = _rows(shape, ranks, 0)
        numel = own // row_shards(shape[0], ranks)[0] * shape[0]
        params[shape[0]] += numel
        over[shape[0]] += 16 * own - 16 * numel // ranks
    return [
        Uneven(rows, params[rows], -(-rows // ranks), over[rows], ranks)
        for rows, _ in over.most_common()
        if rows % ranks
    ]


@dataclass(frozen=True)
class Column:
    """One answer to "how many bytes does a rank hold?", and why it is not another's."""

    who: str
    how: str  # derived, counted, or claimed
    num_bytes: int
    why: str


def side_by_side(model: str, ranks: int) -> list[Column]:
    """Stage 3 of one model in four columns: formula, ours, FSDP2's, and public calculators'."""
    ours, theirs = dry_measure(model, ranks, 3), dry_measure(model, ranks, peer="fsdp2")
    built, padded = architecture(model), f"{ours.padding:,} elements of padding"
    more = "; ".join(str(row) for row in theirs.uneven) or "N divides the rows of every parameter"
    largest = built.vocab * built.width
    rows = [
        Column("16Ψ/N", "derived", 16 * ours.params // ranks, "the papers' form"),
        Column("our stage 3", "derived", ours.held_bytes["predicted"]["total"], padded),
        Column("our stage 3", "counted", ours.held_bytes["measured"]["total"], padded),
        Column("FSDP2", "derived", theirs.held_bytes["predicted"]["total"], more),
        Column("FSDP2", "counted", theirs.held_bytes["measured"]["total"], more),
    ]
    said = compare(ours.params, ranks, 3, largest)
    calculators = [a for a in said if a.who.startswith(("DeepSpeed", "accel", "Eleu", "llm"))]
    return rows + [Column(a.who, "claimed", a.num_bytes, a.convention) for a in calculators]
