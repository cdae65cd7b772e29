"""The lecture's claims that are wrong, or true only with a condition that it leaves out.

Each is put in words of this course, beside what is right, the source, and the lesson that proves
it. Numbers come from the theory wherever it has them. Claims that are right are not listed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import sympy as sp

from zerolab.course.outline import LESSONS
from zerolab.theory.catalog import NODES
from zerolab.theory.memory import derive_limit, held, held_bytes
from zerolab.theory.notation import N_d, Psi, plain
from zerolab.theory.offload import cuts
from zerolab.theory.timeline import derive_overlap_bound
from zerolab.theory.traffic import derive_accumulation, derive_ratio, sent
from zerolab.theory.values import one_of

WRONG, IMPRECISE, GAP = "wrong", "imprecise", "gap"
VERDICTS = {
    WRONG: "not true as it stands",
    IMPRECISE: "true only with a condition that is not stated",
    GAP: "left out, and needed",
}


@dataclass(frozen=True)
class Erratum:
    """One claim; `section` is the lecture's, or 0 for all of it; `lesson` refutes or mends it."""

    number: str
    section: int
    claim: str
    verdict: str
    right: str
    source: str
    lesson: str


def _gb(params: float, stage: int = 0, ranks: int = 1, kind: str = "total") -> str:
    return f"{held_bytes(stage, ranks, params)[kind] / 1e9:,.4g} GB"


def _bytes(stage: int | str) -> str:
    """A step's traffic in the large-N form, such as 6*Ψ, written 6Ψ bytes."""
    return plain(sum(sent(stage).values())).replace("*", "") + " bytes"


def _times(ratio: sp.Expr) -> str:
    return f"{float(ratio):.3g} times"


def _reduction(stage: int, ranks: int) -> str:
    return _times(16 * Psi / sum(held(stage).values()).subs(N_d, ranks))


def _elements(stage: int) -> str:
    passes = sp.cancel(derive_accumulation(stage).result / Psi)
    return f"({plain(passes)})Ψ" if passes.is_Add else f"{plain(passes)}Ψ"


_STAGE3, _AS_WORDED = derive_ratio(3).result, derive_ratio("lecture-stage-1").result
_DISK = f"{NODES['dgx2'].nvme_bytes / 1e12:g} TB at {NODES['dgx2'].nvme_bytes_per_s / 1e9:g} GB/s"
_ROWS = (
    Erratum("3", 3, "70B parameters: about 280 GB a GPU for optimizer states alone", WRONG,
            f"{_gb(70e9, kind='optimizer_states')}; 280 GB is the fp32 master copy alone, or one "
            f"moment; all states are {_gb(70e9)}", "ZeRO §3.1", "03"),
    Erratum("4", 3, "a GPU stores 1/N of the states and gathers them when it needs them", IMPRECISE,
            "only parameters are gathered: at stage 3 for each use, at stages 1 and 2 once after "
            "the update; gradients are reduce-scattered, optimizer states never travel",
            "ZeRO §5, §7", "03"),
    Erratum("8", 5, "stage 1 all-reduces gradients, all-gathers parameters, and sends what data "
            "parallelism sends", WRONG,
            f"so it sends {_bytes('lecture-stage-1')}, {_times(_AS_WORDED)} as much; a "
            f"reduce-scatter in place of the all-reduce makes it {_bytes(1)}, the same",
            "ZeRO §7.2.1; DeepSpeed's post of 2020-03-17", "05"),
    Erratum("10", 6, "stage 2 sends as much as data parallelism", IMPRECISE,
            f"with one micro-batch a step; with A of them {_elements(2)} elements against "
            f"{_elements(0)}, since gradients leave after every backward",
            "ZeRO §7.2.1; DeepSpeed's assertion against no_sync", "06"),
    Erratum("11", 6, "that volume is 2Ψ bytes a step", WRONG,
            f"2Ψ elements, which are {_bytes(2)} in 16 bits, exactly times (N-1)/N",
            "ZeRO §7.1; nccl-tests", "06"),
    Erratum("12", 7, "stage 3 holds 16Ψ/N", IMPRECISE,
            "that persists; whole units come on top while they are at work",
            "FSDP §3.2.1, §4.4", "07"),
    Erratum("14", 7, "at stage 3 a 70B model fits one 80 GB GPU", IMPRECISE,
            f"it fits each of 64, with {_gb(70e9, 3, 64)} of states; one alone would need "
            f"{_gb(70e9)}", "ZeRO §5.3", "07"),
    Erratum("15", 7, "6Ψ bytes, because parameters are gathered for forward and backward",
            IMPRECISE, f"{_bytes(3)} is right, but two all-gathers are 4Ψ: the third pass is the "
            "reduce-scatter of the gradients", "ZeRO §7.2.2", "07"),
    Erratum("16", 7, "stage 3 sends 3 times what data parallelism sends", WRONG,
            f"{_bytes(3)} against {_bytes(0)}: {_times(_STAGE3)}; 3 divides bytes by elements",
            "ZeRO §7.2.2; FSDP §3.2.1", "07"),
    Erratum("17", 8, "N times less memory is bought with 3 times the communication", WRONG,
            f"N times less of model states alone, for {_times(_STAGE3)} the bytes; activations, "
            "buffers and fragmentation do not shrink with N", "ZeRO §3.2, §7", "08"),
    Erratum("18", 9, "ZeRO-Offload moves partitioned optimizer states to the CPU", IMPRECISE,
            "16-bit gradients and the update itself go there, too; it works on one GPU, where "
            "nothing is partitioned; on several it builds on stage 2", "ZeRO-Offload §3.5", "09"),
    Erratum("20", 9, "NVMe storage is practically without limit", IMPRECISE,
            f"a DGX-2 node has {_DISK}, for all of its GPUs: the speed is the limit",
            "ZeRO-Infinity figure 2b, §5.2", "09"),
    Erratum("21", 9, "under ZeRO-Infinity parameters are on GPU or CPU, optimizer states on CPU or "
            "NVMe", WRONG,
            "parameters may be on NVMe, too, all states may stay on the GPU, activation "
            "checkpoints may go to the CPU; in DeepSpeed NVMe needs stage 3",
            "ZeRO-Infinity table 2; DeepSpeed configuration page", "09"),
    Erratum("22", 9, "after the CPU's step the new parameters are prefetched to the GPU", IMPRECISE,
            f"ZeRO-Offload copies them after the step, tile by tile (of the {cuts()[0].crossing}Ψ "
            "bytes that cross, half go up); prefetching belongs to stage 3 and ZeRO-Infinity",
            "ZeRO-Offload §5.1; ZeRO-Infinity §6.2", "09"),
    Erratum("23", 9, "the CPU's step for one micro-batch overlaps with the next micro-batch", WRONG,
            "the CPU steps once per optimizer step, after the last micro-batch; overlapping it "
            "with the next step is the delayed parameter update, which changes the training and "
            "is not in DeepSpeed", "ZeRO-Offload §5.2, §6.2.4", "09"),
    Erratum("24", 10, "FSDP is PyTorch's ZeRO-3", IMPRECISE,
            "it also has a layout like ZeRO-2, a hybrid and a replicated one", "FSDP §3.2", "10"),
    Erratum("25", 10, "unlike DeepSpeed it uses PyTorch's process groups", WRONG,
            "DeepSpeed's communication wraps torch.distributed, too", "DeepSpeed source", "10"),
    Erratum("26", 10, "FSDP shards single parameters, DeepSpeed layers", WRONG,
            "the other way round: DeepSpeed cuts each parameter, FSDP1 one flat buffer of a unit; "
            "FSDP2 cuts each parameter along dimension 0", "FSDP §3.2.1; both sources", "10"),
    Erratum("28", 10, "mixed precision comes from PyTorch's AMP", WRONG,
            "from policies of its own: one cast for a unit, and collectives in low precision; "
            "autocast does neither", "FSDP §4.4", "10"),
    Erratum("30", 10, "SHARD_GRAD_OP is ZeRO-2", IMPRECISE,
            "its parameters are sharded outside of computation, too: 16Ψ/N bytes persist, with 2Ψ "
            "more from forward to the end of backward", "torch's documentation of FSDP", "10"),
    Erratum("31", 10, "NO_SHARD is DDP", IMPRECISE,
            "similar, and deprecated in favour of DDP; HYBRID_SHARD is left out",
            "torch's documentation of FSDP", "10"),
    Erratum("32", 11, "stage 3's all-gathers send 3 times what data parallelism sends", WRONG,
            f"its all-gathers send 2Ψ elements, as much; with the reduce-scatter it is "
            f"{_times(_STAGE3)}. Little work per step does make it slow, as advised",
            "ZeRO §7.2.2", "11"),
    Erratum("33", 11, "without overlap training is 2 to 3 times slower", WRONG,
            f"one stream of work and one of messages gain at most {derive_overlap_bound().result} "
            "times from overlap; FSDP's prefetch gained about 18 % at 175B",
            "arithmetic; FSDP figure 6b", "11"),
    Erratum("35", 12, "stage 1 saves about 3 times, stage 2 about 4 times", IMPRECISE,
            f"{_reduction(1, 8)} and {_reduction(2, 8)} on 8 ranks; the limits are "
            f"{derive_limit(1).result} and {derive_limit(2).result}", "ZeRO §1, §5", "12"),
    Erratum("36", 12, "ZeRO-Offload uses CPU and NVMe", WRONG,
            "it uses the CPU alone; NVMe came with ZeRO-Infinity",
            "ZeRO-Offload; ZeRO-Infinity", "12"),
    Erratum("37", 0, "memory means model states: activations are named and not counted; buffers, "
            "padding, tied or frozen parameters, accumulation, other precisions, GB or GiB do not "
            "occur", GAP, "each of them changes a figure; which it is must be said beside it",
            "ZeRO §3.2", "04"),
)  # fmt: skip
ERRATA: dict[str, Erratum] = {row.number: row for row in _ROWS}


class Errata:
    """Rows of errata, readable in a notebook and in a terminal."""

    def __init__(self, rows: tuple[Erratum, ...]) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return "\n".join(
            f"{r.number:>3} {r.verdict}: {r.claim}.\n    Right: {r.right}. "
            f"[{r.source}; lesson {_lesson(r)}]" for r in self.rows)  # fmt: skip

    def _repr_markdown_(self) -> str:
        head = "| # | section | the claim | verdict | what is right | source | lesson |\n"
        return head + "|---" * 7 + "|\n" + "\n".join(
            f"| {r.number} | {r.section or 'all'} | {r.claim} | {r.verdict} | {r.right} "
            f"| {r.source} | {_lesson(r)} |" for r in self.rows)  # fmt: skip

    def count(self) -> dict[str, int]:
        """How many rows have each verdict."""
        return dict(Counter(row.verdict for row in self.rows))


def _lesson(row: Erratum) -> str:
    return row.lesson + ("" if LESSONS[row.lesson].minutes else " (announced)")


def errata(verdict: str | None = None, lesson: str | None = None) -> Errata:
    """All errata, or those of one verdict or lesson; ValueError for one that does not exist."""
    if verdict is not None:
        one_of("Verdict", verdict, VERDICTS)
    if lesson is not None:
        one_of("Lesson", lesson, LESSONS)
    return Errata(tuple(r for r in _ROWS if verdict in (None, r.verdict)
                        and lesson in (None, r.lesson)))  # fmt: skip
