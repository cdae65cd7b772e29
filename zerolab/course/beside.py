"""Peers under the meter of the stages: what they hold and send, and which stage that is.

DeepSpeed's rules are those of its version 0.19.8. At stages 1 and 2 gradients are reduced by
`average_tensor` (deepspeed.runtime.zero.stage_1_and_2), which cuts a bucket in slices by owner. Its
option `reduce_scatter`, on by default, is none: with `use_multi_rank_bucket_allreduce`, on by
default too, the slices go to `allreduce_and_scatter`, which all-reduces them in one and keeps this
rank's, 2 passes where 1 is enough. Without that option each slice is sent to its owner by
`dist.reduce`, 1 pass. `overlap_comm` and the backend change when this happens, and not what.
`copy_grads_in_partition` keeps gradients of whole parameters; `all_gather_dp_groups`
(deepspeed.runtime.utils) gathers the flat buffer. Stage 3 calls `reduce_scatter_coalesced`
(deepspeed.runtime.comm.coalesced_collectives) with each parameter padded on its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zerolab.course.columns import derived_and_counted, held_and_sent, on_the_wire
from zerolab.course.identify import name_it
from zerolab.course.partition import greedy_shards, row_shards, touched_shards
from zerolab.practice.gpt import GPT
from zerolab.practice.observe import Seen, observe
from zerolab.practice.peers import peer_named
from zerolab.practice.world import World
from zerolab.theory.memory import held_bytes, padded_params
from zerolab.theory.traffic import sent_bytes

ROWS = "rows of each parameter, the last ranks padded"
FLAT = "a flat buffer, padded to a multiple of 2N"
RULES: dict[str, tuple[int, int | str, str, str]] = {  # stage, schedule, recipe, who owns what
    "ddp": (0, 0, "adamw-fp32", "nothing is divided, so nothing is padded"),
    "zero-redundancy": (1, "lecture-stage-1", "adamw-fp32", "whole parameters, dealt out greedily"),
    "fsdp2": (3, 3, "fsdp2-mixed", ROWS),
    "fsdp2-fp32": (3, 3, "adamw-fp32", ROWS),
    "fsdp2-no-reshard": (3, "shard-grad-op", "fsdp2-mixed", ROWS),
    "deepspeed-1": (1, "lecture-stage-1", "adamw-mixed", FLAT),
    "deepspeed-2": (2, "lecture-stage-1", "adamw-mixed",
                    f"{FLAT}; gradients of each parameter that a slice has a part of, whole"),
    "deepspeed-3": (3, 3, "adamw-mixed",
                    "each parameter flat, padded to a multiple of N; told to keep none whole"),
}  # fmt: skip
_KINDS = ("parameters", "gradients", "optimizer_states")


@dataclass(frozen=True)
class PeerComparison:
    """One peer on one number of ranks; bytes of rank 0, sent ones per step of one micro-batch.

    The keys of `zerolab.course.measure.Comparison` have the same meaning. `held_bytes` are derived
    by the stage's formula with the peer's own rule of who owns what; `equal` compares each kind
    and collective on every rank. A peer's broadcasts of updated parameters stand under all_gather.

    named         which stage that is, by its bytes
    evidence      a sentence for each thing in which it is not that stage as the papers have it
    besides_bytes held beside the three kinds, such as counters of steps, or DeepSpeed's bucket
    """

    peer: str
    named: str
    evidence: list[str]
    stage: int
    ranks: int
    recipe: str
    params: int
    rule: str
    held_bytes: dict[str, dict[str, int]]
    besides_bytes: int
    sent_bytes: dict[str, dict[str, int]]
    wire_bytes: int | None
    wire_reason: str | None
    peak_bytes: int
    equal: bool

    @property
    def agrees(self) -> bool:
        """Derived equals counted on every rank."""
        return self.equal

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """A table for people."""
        lines = [
            f"{self.peer} on {self.ranks} ranks, {self.params:,} parameters: {self.named}",
            f"recipe {self.recipe}; {self.rule}",
            *(f"- {sentence}" for sentence in self.evidence),
            "",
            *derived_and_counted(
                "bytes of rank 0", held_and_sent(self.held_bytes, self.sent_bytes)
            ),
        ]
        return "\n".join(
            [
                *lines,
                "",
                f"held besides, as counters of steps or a bucket: {self.besides_bytes:,} bytes",
                f"peak inside a step, activations included: {self.peak_bytes:,} bytes",
                on_the_wire(self.wire_bytes, self.wire_reason),
            ]
        )


def measure_peer(peer: str, ranks: int, world: World | None = None) -> PeerComparison:
    """Runs a peer on real ranks; ValueError, in one sentence, for one that is not here."""
    peer_named(peer)
    if world is None:
        with World(ranks) as own_world:
            return measure_peer(peer, ranks, own_world)
    ranks = world.size
    seen: list[Seen] = world.run(observe, peer)
    stage, _, recipe, rule = RULES[peer]
    derived, sent = [_held(peer, rank, ranks) for rank in range(ranks)], _derived_sent(peer, ranks)
    counted = [_counted(s) for s in seen]
    found = name_it(seen, ranks) if ranks > 1 else None
    wire, private = seen[0].wire, world.private_ports
    reason = None if wire is not None and private else "there is no loopback counter of our own"
    return PeerComparison(
        peer=peer,
        named=found.name if found else "one rank: every stage is the same",
        evidence=found.evidence if found else [],
        stage=stage,
        ranks=ranks,
        recipe=recipe,
        params=seen[0].params,
        rule=rule,
        held_bytes={"predicted": derived[0], "measured": counted[0]},
        besides_bytes=sum(seen[0].held.values()) - counted[0]["total"],
        sent_bytes={"predicted": sent, "measured": _sent(seen[0])},
        wire_bytes=None if wire is None or reason else round(wire / ranks),
        wire_reason=reason,
        peak_bytes=max(s.peak for s in seen),
        equal=counted == derived and all(_sent(s) == sent for s in seen),
    )


def _held(peer: str, rank: int, ranks: int) -> dict[str, int]:
    """What a rank holds by the peer's rule: its parameters' shapes, dealt out."""
    shapes = [tuple(p.shape) for p in GPT().parameters()]
    numels = [p.numel() for p in GPT().parameters()]
    stage, _, recipe, _ = RULES[peer]
    sizes = held_bytes(stage, ranks, sum(numels), recipe)
    if peer == "ddp":
        sizes = held_bytes(0, 1, sum(numels), recipe)
    elif peer == "zero-redundancy":
        sizes = held_bytes(0, 1, sum(numels), recipe)
        sizes["optimizer_states"] = 8 * greedy_shards(numels, ranks)[rank]
    elif peer.startswith("fsdp2"):
        rows = [(row_shards(s[0], ranks), n // s[0]) for s, n in zip(shapes, numels, strict=True)]
        padded = sum(owned[0] * width for owned, width in rows)
        own = sum(owned[rank] * width for owned, width in rows)
        sizes = {"parameters": 4 * padded, "gradients": 4 * padded, "optimizer_states": 8 * own}
    elif peer == "deepspeed-3":
        sizes = held_bytes(stage, ranks, sum(numels), recipe, numels)
    else:
        sizes = held_bytes(stage, ranks, _flat(numels, ranks), recipe)
        whole = [sum(numels)] * ranks if stage == 1 else touched_shards(numels, ranks, multiple=2)
        sizes["gradients"] = 2 * whole[rank]
    sizes.pop("total", None)
    return {**sizes, "total": sum(sizes.values())}


def _flat(numels: list[int], ranks: int) -> int:
    """Elements of DeepSpeed's flat buffer, with its padding."""
    return padded_params(sum(numels), None, 2 * ranks)


def _derived_sent(peer: str, ranks: int) -> dict[str, int]:
    """What each rank sends by the peer's rule."""
    numels = [p.numel() for p in GPT().parameters()]
    _, schedule, recipe, _ = RULES[peer]
    if peer.startswith("fsdp2"):
        padded = sum(_held(peer, rank, ranks)["parameters"] for rank in range(ranks)) // 4
        return sent_bytes(schedule, ranks, padded, recipe)
    if peer == "deepspeed-3":
        return sent_bytes(schedule, ranks, sum(numels), recipe, numels)
    # an all-reduce pads nothing: the ring's share of all elements, not of equal shards
    sent = sent_bytes(schedule, 2, 2, recipe)
    sent = {name: times * sum(numels) * (ranks - 1) // ranks for name, times in sent.items()}
    if peer == "zero-redundancy":  # a broadcast for each parameter, each with its share of a ring
        sent["all_gather"] = sum(4 * numel * (ranks - 1) // ranks for numel in numels)
    elif peer.startswith("deepspeed"):
        flat = sent_bytes(schedule, ranks, _flat(numels, ranks), recipe)
        sent["all_gather"] = flat["all_gather"]
    return sent | {"total": sent["all_reduce"] + sent["reduce_scatter"] + sent["all_gather"]}


def _counted(seen: Seen) -> dict[str, int]:
    sizes = {kind: seen.held.get(kind, 0) for kind in _KINDS}
    return {**sizes, "total": sum(sizes.values())}


def _sent(seen: Seen) -> dict[str, int]:
    counted = {name: seen.sent.get(name, 0) for name in ("all_reduce", "reduce_scatter")}
    counted["all_gather"] = seen.sent.get("all_gather", 0) + seen.sent.get("broadcast", 0)
    return {**counted, "total": seen.sent["total"]}
