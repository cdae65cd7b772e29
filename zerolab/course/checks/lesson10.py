"""Lesson 10: FSDP. Who holds which rows, what each name costs, and a model under fully_shard."""

from __future__ import annotations

import operator
from typing import Any

from zerolab.course.checks import lesson10_shard
from zerolab.course.checks.core import Wrong, exercise, type_of
from zerolab.course.checks.functions import Misstep, expect_function, without
from zerolab.course.checks.lesson13 import Part, expect_parts, size
from zerolab.course.checks.numbers import Slip, expect_bytes
from zerolab.course.layouts import padded_by, unit_numels
from zerolab.course.partition import even_shards, row_shards
from zerolab.theory.layouts import layout

GIB = 2**30


@exercise(
    "10.1",
    "Rows of a parameter",
    points=2,
    hints=[
        "Every rank but the last ones gets the same number of rows, rounded up.",
        "A rank's rows begin at rank · ceil(rows / ranks). How many are left there?",
    ],
)
def rows_per_rank(answer: Any) -> None:
    def as_list(rows: int, ranks: int) -> list[int]:
        return list(row_shards(rows, ranks))

    missteps: list[Misstep] = [
        (
            lambda d, n: [d // n + (rank < d % n) for rank in range(n)],
            "This is the fairest deal (numpy.array_split). torch.chunk cuts pieces of ceil(d/N).",
        ),
        (lambda d, n: [-(-d // n)] * n, "These are the padded rows: together more than there are."),
        (lambda d, n: [d // n] * n, "Some rows belong to nobody: round up, not down."),
        (
            lambda d, n: [d // n] * (n - 1) + [d - d // n * (n - 1)],
            "Here the last rank takes the rest. It is the last ranks that get less, or nothing.",
        ),
        (lambda d, n: [-(-d // n)] * (n - 1) + [d - -(-d // n) * (n - 1)], "More than is left."),
        (lambda d, n: [d / n] * n, "A row is not cut: whole numbers."),
        (
            lambda d, n: [min(-(-d // n), d - rank * -(-d // n)) for rank in range(n)],
            "Less than no rows: where a rank begins after the end, it gets 0.",
        ),
        (
            lambda d, n: [rows for rows in row_shards(d, n) if rows],
            "A rank without rows is a rank, too: it has 0 of them.",
        ),
        (lambda d, n: as_list(d, n)[::-1], "The first ranks get the whole pieces, the last less."),
        (lambda d, n: as_list(d, 4), "That is for four ranks: their number is `ranks`."),
    ]
    alone = without(answer, "zerolab.course.partition:even_shards")

    def tried(rows: int, ranks: int) -> Any:
        got = alone(rows, ranks)
        if _numbers(got) is None:
            raise Wrong(f"You return {type_of(got)}.", "Return a list: a whole number by rank.")
        return got

    expect_function(
        tried if callable(answer) else answer,
        as_list,
        [(5, 4), (9, 4), (6, 4), (8, 4), (1, 4), (13, 3), (64, 7), (3, 1)],
        missteps,
        lambda d, n: f"{d} rows on {n} ranks",
        "Each rank gets rows / ranks rounded up, or what is left of the rows.",
        lambda got, wanted: _numbers(got) == wanted,
    )


def _numbers(got: Any) -> list[float] | None:
    """A list, tuple, array or tensor of numbers as a list of plain ones; None for all else."""
    got = got.tolist() if hasattr(got, "tolist") else got
    if not isinstance(got, list | tuple):
        return None
    try:
        return [x if type(x) is float else operator.index(x) for x in got]
    except TypeError:
        return None


@exercise(
    "10.2",
    "Shard a model with fully_shard",
    points=4,
    hints=[
        "A call of fully_shard takes all parameters in its module that no earlier call has taken.",
        "So go from the inside out: each of model.units(), then the model.",
        "fully_shard(module, mesh=mesh) changes the module; its other defaults are right here.",
    ],
)
def shard_model(answer: Any) -> None:
    if not callable(answer):
        raise Wrong("This is no function.", "Give shard_model itself.")
    lesson10_shard.judge(answer)


@exercise(
    "10.3",
    "SHARD_GRAD_OP of 7 billion parameters",
    points=2,
    hints=[
        "At rest everything is divided: which stage is that?",
        "From forward to the end of backward whole parameters of 2 bytes come on top.",
    ],
)
def shard_grad_op(answer: Any) -> None:
    psi, n = 7e9, 4
    sizes = layout("SHARD_GRAD_OP").bytes_of(psi, n)
    states, peak = sizes["states"], sizes["states"] + sizes["whole"]
    zero2, known = (2 + 14 / n) * psi, "That is ZeRO-2, whose parameters are whole at all times."
    parts = {
        "states": (1.0, size(states, "States after backward", [
            Slip(zero2, known),
            Slip(16 * psi, "That is nothing divided: NO_SHARD."),
            Slip(peak, "That is the peak: after backward the parameters are shards again."),
            Slip(12 / n * psi, "That is without gradients, as it is between two steps."),
            Slip(16 / 8 * psi, "That is for eight ranks; here there are four."),
        ])),
        "peak": (1.0, size(peak, "States and whole parameters", [
            Slip(states, "That is FULL_SHARD, but for a unit or two: here all units stay whole."),
            Slip(zero2, known),
            Slip(12 / n * psi + 2 * psi, "The gradients of an earlier micro-batch are there, too."),
            Slip(states + 2 / n * psi, "2Ψ/N is a shard: whole parameters are 2Ψ on every rank."),
            Slip(states + 4 * psi, "The whole parameters are in bf16: 2 bytes each, not 4."),
            Slip(2 * psi, "That is what comes on top alone."),
            Slip((4 + 16 / n - 4 / n) * psi, "The shards stay beside the whole parameters."),
        ])),
    }  # fmt: skip
    expect_parts(answer, parts)


@exercise(
    "10.4",
    "Read an out-of-memory message",
    points=3,
    hints=[
        "What the process has in use is: allocated, reserved and not allocated, and a rest.",
        "The request has to come out of what is free on the device.",
        "PyTorch could also serve it from its own reserve, if that were in one piece.",
    ],
)
def out_of_memory(answer: Any) -> None:
    asked, free, in_use, allocated, reserved = (x * GIB for x in (3.5, 1.4, 77.6, 68.2, 8.3))
    unit = 'Write the unit, as the message does: "1.40 GiB".'
    parts = {
        "outside": (1.0, size(in_use - allocated - reserved, "Outside of PyTorch", [
            Slip(1.1, unit),
            Slip(79.25 * GIB - allocated - reserved, "What is free is nobody's: begin with what is "
                 "in use, not with all there is."),
            Slip(in_use - allocated, "PyTorch has its reserve, too: that is not outside."),
            Slip(in_use - reserved, "The allocated bytes are PyTorch's, too."),
            Slip(79.25 * GIB - in_use, "That is free, up to rounding and the driver."),
            Slip(reserved, "That is the reserve: PyTorch has it from the device, unused."),
        ])),
        "short": (1.0, size(asked - free, "Short by", [
            Slip(2.1, unit),
            Slip(asked, "1.40 GiB of it are free."),
            Slip(asked + free, "The free bytes help: subtract them."),
            Slip(reserved - asked, "That is what would be left of the reserve."),
            Slip(free, "That is what is free."),
        ])),
        "unused": (1.0, size(free + reserved, "Free or in reserve", [
            Slip(9.7, unit),
            Slip(in_use - allocated + free, "What lies outside of PyTorch is in use."),
            Slip(reserved, "What is free on the device comes on top."),
            Slip(free, "PyTorch's reserve is unused as well."),
            Slip(free + reserved - asked, "Before the request, not after it."),
            Slip(79.25 * GIB - allocated, "What lies outside of PyTorch cannot be used."),
        ])),
    }  # fmt: skip
    expect_parts(answer, parts)


def _claim(choices: dict[str, str], right: str, value: float, what: str, slips: list[Slip]) -> Part:
    """A pair of a choice and a number of bytes; `choices` name what each wrong one would mean."""

    def judge(pair: Any) -> None:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise Wrong(f"{what}: {pair!r} is no pair.", "Give a choice and a number of bytes.")
        choice, number = pair
        choice = f"{choice:g}" if type(choice) in (int, float) else choice  # 1.5 for "1.5"
        if type(choice) is not str or choice not in choices:
            one_of = ", ".join(f'"{known}"' for known in choices)
            raise Wrong(f"{what}: {choice!r} is no choice.", f"First the choice, one of {one_of}.")
        if choice != right:
            raise Wrong(f"{what}: {choice!r} is not it.", choices[choice])
        expect_bytes(number, value, what, slips)

    return judge


@exercise(
    "10.5",
    "Choose between the two",
    points=3,
    hints=[
        "SHARD_GRAD_OP sends less: try it first, FULL_SHARD if it does not fit.",
        "16Ψ/N + 2Ψ + room against the memory; then 16Ψ/N + 2 · 2 · unit + room.",
    ],
)
def choose(answer: Any) -> None:
    def rule(
        psi: float, n: int, memory: float, room: float, unit: float, *, whole: float = 2,
        both: float = 4, room_counts: int = 1, zero2: bool = False, last: str | None = None,
        strict: bool = False, states_of: float = 16, first: str = "SHARD_GRAD_OP",
    ) -> str | None:  # fmt: skip
        states, free = states_of * psi / n, memory - room * room_counts
        if first == "FULL_SHARD" and states + both * unit <= free:
            return first
        kept = (2 + 14 / n) * psi if zero2 else states + whole * psi
        if kept < free or (kept == free and not strict):
            return "SHARD_GRAD_OP"
        least = states + both * unit
        return "FULL_SHARD" if least < free or (least == free and not strict) else last

    def misstep(words: str, **changed: Any) -> Misstep:
        return lambda *case: rule(*case, **changed), words

    missteps: list[Misstep] = [
        misstep("The room for activations is missing.", room_counts=0),
        (
            lambda psi, n, memory, *rest: rule(psi, 1, n * memory, *rest),
            "You added up all ranks: a rank has 16Ψ/N of states, and 2Ψ if it has them whole.",
        ),
        misstep("SHARD_GRAD_OP at its peak is 16Ψ/N + 2Ψ, not ZeRO-2's 2Ψ + 14Ψ/N.", zero2=True),
        misstep("From forward to backward SHARD_GRAD_OP has 2Ψ bytes more.", whole=0),
        misstep("Whole parameters are gathered in 16 bits: 2Ψ, not 4Ψ.", whole=4),
        misstep("FULL_SHARD has two units whole at a time, of 2 bytes an element.", both=0),
        misstep("Two units are whole at a time: one at work, one on its way.", both=2),
        misstep("A whole unit has 2 bytes an element, two of them 4.", both=8),
        misstep("Two units are whole at a time, not three.", both=6),
        misstep("The gradients of an earlier micro-batch are there, too: 16Ψ/N.", states_of=12),
        misstep("SHARD_GRAD_OP sends less: where both fit, it is the one.", first="FULL_SHARD"),
        (
            lambda psi, n, *rest: rule(psi, n, *rest, whole=2 / n),
            "Whole parameters are whole on every rank: 2Ψ, not 2Ψ/N.",
        ),
        (
            lambda psi, n, *rest: rule(psi, n, *rest, states_of=16 * n),
            "The states are divided by the number of ranks: 16Ψ/N.",
        ),
        (
            lambda psi, n, memory, *rest: rule(psi, n, n * memory, *rest),
            "The memory is each rank's: do not add it up over ranks.",
        ),
        misstep("If neither fits, return None.", last="FULL_SHARD"),
        misstep("What fits exactly, fits.", strict=True),
        (lambda *case: "FULL_SHARD", "FULL_SHARD sends 1.5 times as much: only where it must be."),
        (lambda *case: "SHARD_GRAD_OP", "SHARD_GRAD_OP does not always fit."),
        (lambda *case: None, "In some cases one of the two fits."),
    ]
    cases = [
        (7e9, 4, 80e9, 20e9, 0.2e9),
        (7e9, 4, 80e9, 40e9, 0.2e9),
        (7e9, 4, 80e9, 38e9, 0.2e9),
        (7e9, 4, 80e9, 39e9, 0.2e9),
        (7e9, 4, 80e9, 45e9, 0.2e9),
        (7e9, 4, 80e9, 28e9, 0.2e9),
        (7e9, 4, 80e9, 50.6e9, 0.2e9),
        (7e9, 4, 80e9, 51.9e9, 0.2e9),
        (7e9, 4, 80e9, 51.5e9, 0.2e9),
        (7e9, 4, 80e9, 51.2e9, 0.2e9),
        (70e9, 8, 80e9, 10e9, 0.9e9),
        (70e9, 16, 80e9, 5e9, 0.9e9),
        (7e9, 2, 80e9, 10e9, 0.2e9),
        (7e9, 64, 80e9, 63e9, 0.2e9),
        (1e9, 2, 80e9, 10e9, 0.1e9),
        (7e9, 1, 80e9, 10e9, 0.2e9),
        (8.5e9, 2, 80e9, 11e9, 0.2e9),
    ]
    expect_function(
        answer,
        rule,
        cases,
        missteps,
        lambda psi, n, memory, room, unit: (
            f"{psi / 1e9:g} billion parameters on {n} ranks of {memory / 1e9:g} GB, "
            f"{room / 1e9:g} GB of it for activations"
        ),
        'Add both up for this case. There are "SHARD_GRAD_OP", "FULL_SHARD" and None.',
        lambda got, wanted: type(got) is type(wanted) and got == wanted,
    )


@exercise(
    "10.6",
    "ZeRO-3 and FSDP, claim by claim",
    points=6,
    hints=[
        "Every number stands in an output above: the table, the kinds, the gathers.",
        "A rank of ZeRO-3 has 2 + 2 + 12 bytes over N, one of FSDP 4 + 4 + 8.",
        "Between two steps there are no gradients.",
    ],
)
def compare_claims(answer: Any) -> None:
    n = 4
    flat, rows = padded_by("FULL_SHARD", n), padded_by("reshard_after_forward=True", n)
    embedding, block, _, head = (2 * n * even_shards(numel, n)[0] for numel in unit_numels())
    other = Slip(16 * rows / n, "That is FSDP2's, whose last ranks are padded by rows.")
    parts: dict[str, tuple[float, Part]] = {
        "states": (1.0, _claim(
            dict.fromkeys(("same", "less", "more"), "Both hold 16Ψ/N: compare the two rows."),
            "same", 16 * flat / n, "FULL_SHARD's states against stage 3's",
            [other, Slip(12 * flat / n, "That is without gradients, as between two steps."),
             Slip(16 * flat, "That is all ranks together.")])),
        "parameters": (1.0, _claim(
            {"fp32": "", "16 bits": "16 bits are cast when a unit is gathered; the shard is fp32."},
            "fp32", 4 * flat / n, "A rank's parameters under FULL_SHARD",
            [Slip(2 * flat / n, "That is stage 3's shard, in 16 bits."),
             Slip(4 * rows / n, "That is FSDP2's, padded by rows."),
             Slip(4 * flat, "That is all ranks together.")])),
        "cut": (1.0, _claim(
            {"a unit's flat buffer": "",
             "each parameter": "That is DeepSpeed's stage 3: each parameter, flat.",
             "dimension 0": "That is FSDP2: dimension 0 of each parameter.",
             "whole layers": "Nobody here hands out whole layers: a layer is cut over all ranks."},
            "a unit's flat buffer", block, "What FSDP1 cuts, and a block's gathered bytes",
            [Slip(embedding, "That is the embedding."), Slip(head, "That is the head."),
             Slip(block / n, "That is a rank's shard; the gather fills the whole buffer.")])),
        "SHARD_GRAD_OP": (1.0, _claim(
            {"sharded": "", "whole": "That would be ZeRO-2: count what is there between steps."},
            "sharded", 12 * flat / n, "Between two steps under SHARD_GRAD_OP",
            [Slip(16 * flat / n, "That is after backward, with gradients."),
             Slip((2 + 12 / n) * flat, "That is stage 2 between two steps."),
             Slip(14 * flat / n, "That is our stage 3 between two steps."),
             Slip((2 + 16 / n) * flat, "That is the end of forward: nothing is whole now.")])),
        "sent": (1.0, _claim(
            {"1": "That is SHARD_GRAD_OP, which gathers once.",
             "1.5": "", "3": "3 divides bytes by elements, or forgets the second half of an "
             "all-reduce."},
            "1.5", 6 * flat * (n - 1) / n, "FULL_SHARD's traffic over NO_SHARD's",
            [Slip(4 * flat * (n - 1) / n, "That is SHARD_GRAD_OP, or NO_SHARD."),
             Slip(6 * rows * (n - 1) / n, "That is FSDP2's."),
             Slip(8 * sum(unit_numels()) * (n - 1) / n, "That is DDP in fp32: both in bf16."),
             Slip(12 * flat * (n - 1) / n, "That is in fp32; the table computes in bf16.")])),
        "precision": (1.0, _claim(
            {"policy": "", "autocast": "Under autocast the collectives stay in fp32: compare the "
             "bytes on the wire."},
            "policy", 12 * rows * (n - 1) / n, "What halves FSDP2's traffic, and autocast's bytes",
            [Slip(6 * rows * (n - 1) / n, "That is what the policy sends: give autocast's bytes."),
             Slip(12 * flat * (n - 1) / n, "That is FSDP1's in fp32; the cell ran FSDP2.")])),
    }  # fmt: skip
    expect_parts(answer, parts)
