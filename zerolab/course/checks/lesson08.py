"""Lesson 08: communication. Two collectives as rings, made of messages between neighbours."""

from __future__ import annotations

import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise
from zerolab.course.checks.functions import expect_callable
from zerolab.course.checks.numbers import Slip, expect_bytes
from zerolab.course.checks.on_ranks import on_ranks
from zerolab.practice.meter import Meter

WORLD_SIZES = (4, 3, 2, 1)  # each on ranks 0, 1 … of the checks' four
LENGTHS = {4: 3, 3: 5, 2: 4, 1: 2}  # elements of a chunk, in a ring of so many ranks
BASE = 8  # of the codes below: how often a part was added, at most seven times


@exercise(
    "08.1",
    "Predict the busiest rank",
    points=1,
    hints=[
        "Rank 0 is the busiest. To how many others does it send the sum, and how large is it?",
        "Three times 80 MB.",
    ],
)
def predict(answer: Any) -> None:
    size = 80e6
    slips = [
        Slip(size, "That is what each of the others sends; rank 0 answers three of them."),
        Slip(2 * size, "Who sends twice? The others send once, and rank 0 sends to three ranks."),
        Slip(4 * size, "Rank 0 need not send to itself: there are N-1 others."),
        Slip(6 * size, "Sending and receiving together: count what the rank sends."),
        Slip(1.5 * size, "That is the ring, 2S(N-1)/N, which this lesson is about to build."),
        Slip(0.75 * size, "That is one pass of a ring. Here nobody has thought of one yet."),
        Slip(3 * 80, 'That is the number of MB: give bytes, or write the unit, "… MB".'),
    ]
    expect_bytes(answer, 3 * size, "Bytes that the busiest of four ranks sends", slips)


class NotARing(ValueError):
    """What an answer did that is no message between neighbours."""


class _RingMeter(Meter):
    """Counts, and lets nothing pass but chunks to the right neighbour and from the left one."""

    def __init__(self, rank: int, world_size: int, chunk: Tensor) -> None:
        super().__init__()
        self.rank, self.world_size, self.chunk = rank, world_size, chunk

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._look(func._schema.name.split("::")[1], args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _look(self, op: str, args: Any) -> None:
        frame: Any = sys._getframe()
        while frame := frame.f_back:
            if frame.f_globals.get("__name__") == "zerolab.practice.ring":
                raise NotARing("this is the package's own ring: write it yourself")
        if op not in ("send", "recv_"):
            raise NotARing(f"{op} is no message from one rank to another: use isend and recv")
        tensor, peer, way = args[0][0], args[2], -1 if op == "recv_" else 1
        does = "receives from" if op == "recv_" else "sends to"
        if peer >= self.world_size:
            raise NotARing(
                f"rank {self.rank} {does} rank {peer}, and this ring has {self.world_size} ranks: "
                "use the world_size that you are given, not 4 and not the whole group's"
            )
        if peer != (self.rank + way) % self.world_size:
            side = "left neighbour, (rank - 1)" if way < 0 else "right neighbour, (rank + 1)"
            raise NotARing(
                f"rank {self.rank} of {self.world_size} {does} rank {peer}: here a rank {does} its "
                f"{side} % world_size, alone"
            )
        if tensor.dtype != self.chunk.dtype:
            raise NotARing(
                f"a buffer is {tensor.dtype}, the chunks are {self.chunk.dtype}: torch.empty_like "
                "makes one of the same dtype"
            )
        if tensor.nbytes not in (self.chunk.nbytes, self.chunk.nbytes * self.world_size):
            raise NotARing(
                f"a message has {tensor.numel()} elements; a chunk has {self.chunk.numel()}"
            )


@dataclass(frozen=True)
class Seen:
    """What one rank shows: the buffer that was to be written, bytes sent, its input untouched."""

    got: Tensor
    sent: int
    unchanged: bool
    returned: bool


def _gather_trial(answer: Callable[..., Any], world_size: int, key: int) -> Seen:
    """Runs on a rank."""
    rank = dist.get_rank()
    shard, full = _shard(rank, key, world_size), torch.full((world_size * LENGTHS[world_size],), -1)
    with _RingMeter(rank, world_size, shard) as meter:
        returned = answer(full, shard, rank, world_size)
    unchanged = torch.equal(shard, _shard(rank, key, world_size))
    return Seen(full, meter.sent.total(), unchanged, returned is not None)


def _reduce_trial(answer: Callable[..., Any], world_size: int, key: int) -> Seen:
    """Runs on a rank."""
    rank = dist.get_rank()
    shard, full = torch.full((LENGTHS[world_size],), -1), _full(rank, world_size, key)
    with _RingMeter(rank, world_size, shard) as meter:
        returned = answer(shard, full, rank, world_size)
    unchanged = torch.equal(full, _full(rank, world_size, key))
    return Seen(shard, meter.sent.total(), unchanged, returned is not None)


def _new_key() -> int:
    """New in each check, and divisible by 2, 3 and 4, so that a mean is an integer, too."""
    return 12 * (secrets.randbelow(100) + 1)


def _shard(rank: int, key: int, world_size: int) -> Tensor:
    """(length of a chunk,) integers that tell whose they are."""
    return (torch.arange(LENGTHS[world_size]) + 100 * (rank + 1)) * key


def _full(rank: int, world_size: int, key: int) -> Tensor:
    """(world_size chunks,) integers: from their sum one reads which parts are in it, how often.

    Rank r's part of chunk c counts 8^(r + world_size·c): each has a digit of its own in base 8.
    """
    digits = [BASE ** (rank + world_size * c) * key for c in range(world_size)]
    length = LENGTHS[world_size]
    return torch.tensor([digit * (i + 1) for digit in digits for i in range(length)])


def _run(trial: Callable[..., Seen], answer: Any, world_size: int, key: int) -> list[Seen]:
    expect_callable(answer)
    try:
        return on_ranks(trial, answer, world_size, key, ranks=list(range(world_size)))
    except Wrong as wrong:
        if "NotARing: " in wrong.difference:
            told = re.sub(r"^.*?NotARing: ", "This is no ring: ", wrong.difference)
            raise Wrong(told) from None
        if "did not come back" not in wrong.difference:
            raise
        where = wrong.misconception.splitlines()[-1]
        first = "its own send first, nobody receives"
        if "running recv" in where and "send" not in where:
            first = "its message first, nobody sends"
        raise Wrong(
            wrong.difference,
            f"A send ends when the neighbour receives. If every rank waits for {first}: start the "
            "send with isend, receive, and only then wait for it. Or some ranks make fewer rounds "
            f"than others.\n{where}",
        ) from None


def _budget(seen: Seen, rank: int, world_size: int) -> None:
    """Raises Wrong, with half of the points, for a right result that cost too much."""
    chunk = seen.got.element_size() * LENGTHS[world_size]
    right = (world_size - 1) * chunk
    if not seen.unchanged:
        raise Wrong(
            f"The result is right, but the input of rank {rank} is not what it was.",
            "The caller still needs it: begin with a clone() of the chunk that you add to.",
            points=2,
        )
    if seen.sent == right:
        return
    if seen.sent < right:
        raise Wrong(f"Rank {rank} of {world_size} sends {seen.sent} bytes; {right} must pass.",
                    "The numbers are right, and came by another way than messages.")  # fmt: skip
    why = f"N-1 = {world_size - 1} rounds do: one more brings your own back. Or is 3 written down?"
    if seen.sent >= right * world_size:
        why = f"You send whole buffers. A round moves one chunk, 1/{world_size} of it."
    raise Wrong(
        f"The result is right, but rank {rank} of {world_size} sends {seen.sent} bytes where "
        f"{right} suffice, (N-1)/N of the buffer.",
        why,
        points=2,
    )


def _written(seen: Seen, name: str, rank: int, begin: str, length: int) -> None:
    if len(seen.got) != length:
        raise Wrong(f"On rank {rank} {name} has {len(seen.got)} elements, no longer {length}.",
                    "Write into the tensor as it is: its length is the caller's.")  # fmt: skip
    if (seen.got == -1).all():
        why = "Write into the tensor that you are given; what you return is not looked at."
        why = why if seen.returned else begin
        raise Wrong(f"Nothing was written into {name} on rank {rank}.", why)


@exercise(
    "08.2",
    "A ring that gathers",
    points=4,
    hints=[
        "First put your own shard into its place. Then N-1 rounds: pass on what came last.",
        (
            "In round k (from 0) a rank sends chunk (rank - k) % world_size to the right and "
            "receives chunk (rank - k - 1) % world_size from the left."
        ),
        "If all ranks wait for their send first, nobody receives: isend, recv, then wait().",
        "chunks = full.view(world_size, -1) gives rows that are views: receive into them.",
    ],
)
def ring_all_gather(answer: Any) -> None:
    key = _new_key()
    for n in WORLD_SIZES:
        right = torch.cat([_shard(rank, key, n) for rank in range(n)])
        for rank, seen in enumerate(_run(_gather_trial, answer, n, key)):
            begin = "Begin with your own shard: it has a place in full, too."
            _written(seen, "full", rank, begin, n * LENGTHS[n])
            if not torch.equal(seen.got, right):
                place = int((seen.got != right).nonzero()[0]) // LENGTHS[n]
                raise Wrong(f"On rank {rank} of {n} chunk {place} of full is not rank {place}'s "
                            "shard.", _why_gathered(seen.got, rank, n, key))  # fmt: skip
            _budget(seen, rank, n)


def _why_gathered(got: Tensor, rank: int, n: int, key: int) -> str:
    whose: list[int | None] = [None] * n  # whose shard stands in each place; -1: nobody's yet
    for place, chunk in enumerate(got.view(n, -1)):
        known = [r for r in range(n) if torch.equal(chunk, _shard(r, key, n))]
        whose[place] = known[0] if known else -1 if (chunk == -1).all() else None
    left, last = (rank - 1) % n, (rank + 1) % n
    empty = [place for place in range(n) if whose[place] == -1]
    if rank in empty:
        return "Your own shard has a place in full, too: copy it there first."
    if n > 2 and empty == [last]:
        return f"The chunk that has the longest way is missing: it takes {n - 1} rounds, N-1."
    if n > 2 and all(whose[place] == left for place in range(n) if place != rank):
        return "Each round brought the left neighbour's own shard: pass on what came in last."
    moved = [place for place in range(n) if whose[place] not in (place, -1, None)]
    if moved:
        return (
            f"Place {moved[0]} has the shard of rank {whose[moved[0]]}. What comes in round k "
            "(from 0) has come k + 1 ranks far: it is chunk (rank - 1 - k) % world_size. Or did "
            "you receive into a buffer that was still being sent?"
        )
    if empty:
        return (
            f"Chunks {empty} never came. Did you wait for what you receive, and pass on what came "
            "in the round before?"
        )
    return "That is nobody's shard: shards are passed on as they are."


@exercise(
    "08.3",
    "A ring that adds up",
    points=4,
    hints=[
        (
            "A chunk's sum travels once round the ring and ends at its owner. Where does it start, "
            "then? At the owner's right neighbour."
        ),
        "So a rank first sends its part of chunk (rank - 1) % world_size: a clone of it.",
        (
            "In each round, receive the left neighbour's sum and add your own part of the same "
            "chunk: in round k (from 1) that is chunk (rank - 1 - k) % world_size."
        ),
        "After N-1 rounds the sum that you hold is that of chunk `rank`: copy it into shard.",
    ],
)
def ring_reduce_scatter(answer: Any) -> None:
    key = _new_key()
    for n in WORLD_SIZES:
        total = sum(_full(rank, n, key) for rank in range(n))
        assert isinstance(total, Tensor)
        for rank, seen in enumerate(_run(_reduce_trial, answer, n, key)):
            begin = "At the end, copy_ the sum that came to you into it: shard = … writes nothing."
            _written(seen, "shard", rank, begin, LENGTHS[n])
            if not torch.equal(seen.got, total.view(n, -1)[rank]):
                raise Wrong(
                    f"On rank {rank} of {n} shard is not the sum of every rank's chunk {rank}.",
                    _why_reduced(seen.got, total, rank, n, key),
                )
            _budget(seen, rank, n)


def _why_reduced(got: Tensor, total: Tensor, rank: int, n: int, key: int) -> str:
    if torch.equal(got * n, total.view(n, -1)[rank]):
        return "You divided by N: the sum is asked for; who wants a mean divides later."
    parts = _parts(int(got[0]), n, key)
    if parts is None:
        return "That is no sum of chunks. Was a buffer used before what it waits for had arrived?"
    chunks = {chunk for _, chunk in parts}
    ranks = {r for r, _ in parts}
    if max(parts.values()) > 1:
        twice = next(part for part, times in parts.items() if times > 1)
        whose = "Your own part" if twice[0] == rank else f"The part of rank {twice[0]}"
        return f"{whose} of chunk {twice[1]} is in it {parts[twice]} times: each rank adds once."
    if len(chunks) > 1:
        return (
            f"Parts of chunks {sorted(chunks)} were added to one another. What arrives in round k "
            "(from 1) is chunk (rank - 1 - k) % world_size: add your part of the same chunk."
        )
    missing = sorted({*range(n)} - ranks)
    if chunks != {rank} and missing and ranks != {rank}:
        return f"The parts of ranks {missing} are missing: N-1 = {n - 1} rounds end at the owner."
    if chunks != {rank}:
        return (
            f"That is of chunk {chunks.pop()}, which another rank owns. A sum starts at the right "
            "neighbour of its owner: first send chunk (rank - 1) % world_size."
        )
    if ranks == {rank}:
        return "That is your own part alone: it was never added to the others'."
    if missing == [rank]:
        return "Your own part is missing: the owner adds the last one."
    return f"The parts of ranks {missing} are missing: in N-1 = {n - 1} rounds each adds its own."


def _parts(value: int, n: int, key: int) -> Counter[tuple[int, int]] | None:
    """How often each (rank, chunk) was added up into a first element; None where it is no sum."""
    digits, rest = divmod(value, key)
    if rest or not 0 < digits < BASE ** (n * n):
        return None
    found = Counter[tuple[int, int]]()
    for place in range(n * n):
        digits, times = divmod(digits, BASE)
        if times:
            found[place % n, place // n] = times
    return found
