"""Peers under the meter of the stages: derived by their own rule of who owns what, and counted."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from zerolab.cli import main
from zerolab.course.beside import RULES, measure_peer
from zerolab.practice import data, peers
from zerolab.practice.gpt import GPT
from zerolab.practice.meter import Meter
from zerolab.practice.peers import HAS_DEEPSPEED, PEERS, peer_named

OURS = [name for name in RULES if not name.startswith("deepspeed")]
THEIRS = ["deepspeed-1", "deepspeed-2", "deepspeed-3"]
where_deepspeed_is = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed here")


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("peer", OURS)
def test_a_peer_holds_and_sends_what_its_rule_derives(world_of, peer, ranks):
    compared = measure_peer(peer, ranks, world_of(ranks))
    assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
    assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
    assert compared.equal
    assert 0 < compared.besides_bytes < 200  # counters of steps


@where_deepspeed_is
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("peer", THEIRS)
def test_deepspeed_holds_and_sends_what_its_rule_derives(world_of, peer, ranks):
    compared = measure_peer(peer, ranks, world_of(ranks))
    assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
    assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
    assert compared.equal
    bucket = 0 if peer == "deepspeed-2" else 2 * 10**7  # stage 2 has let go of it by then
    assert 0 < compared.besides_bytes - bucket < 200


@where_deepspeed_is
@pytest.mark.parametrize(
    ("peer", "named", "passes"),
    [
        ("deepspeed-1", "stage 1 that all-reduces", 3),
        ("deepspeed-2", "stage 2 that all-reduces", 3),
        ("deepspeed-3", "stage 3", 3),
    ],
)
def test_deepspeed_is_named_by_its_bytes(world_of, peer, named, passes):
    compared = measure_peer(peer, 2, world_of(2))
    assert compared.named == named
    sent = compared.sent_bytes["measured"]["total"]
    assert sent == pytest.approx(passes * 2 * compared.params / 2, rel=1e-3)
    told = "\n".join(compared.evidence)
    assert ("a reduce-scatter is enough" in told) == ("all-reduces" in named)
    assert told in compared.as_text().replace("\n- ", "\n")


def masters_after(peer, batches):
    """This rank's fp32 weights after a step of these micro-batches."""
    import torch.distributed as dist

    engine = PEERS[peer](GPT())
    for at in batches:
        loss = engine.loss(*data.batch(at, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss / len(batches))
    engine.step()
    names = peers.DEEPSPEED_STATES["optimizer_states"]
    zero = engine.engine.optimizer
    return torch.cat([p.detach() for name in names for p in getattr(zero, name, [])])


@where_deepspeed_is
@pytest.mark.parametrize("peer", THEIRS)
def test_deepspeed_adds_up_the_gradients_of_all_backwards_of_a_step(world_of, peer):
    world = world_of(2)
    first, turned, last = (world.run(masters_after, peer, b) for b in ((0, 1), (1, 0), (1, 1)))
    for rank in range(2):
        # stage 3 leaves the element of padding as it found it
        assert (first[rank] != turned[rank]).sum() <= 1
        assert (first[rank] != last[rank]).sum() > 1000


@where_deepspeed_is
def test_the_object_of_a_peer_that_prints_is_alone(capsys):
    assert main(["measure", "--peer", "deepspeed-2", "--ranks", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["named"] == "stage 2 that all-reduces"


@pytest.mark.parametrize(
    ("names", "size"),
    [
        (("single_partition_of_fp32_groups", "averaged_gradients", "ipg_buckets"), 40),
        (("fp32_of_another_version", "gradients_of_it", "buckets_of_it"), 0),
    ],
)
def test_what_a_deepspeed_of_other_names_holds_has_no_kind_and_no_error(monkeypatch, names, size):
    engine = GPT()
    initialize = SimpleNamespace(initialize=lambda **_: (engine,))
    monkeypatch.setattr(peers, "HAS_DEEPSPEED", True)
    monkeypatch.setitem(sys.modules, "deepspeed", initialize)
    peer = peers.DeepSpeed(engine, 2)
    with Meter() as meter:
        bucket = SimpleNamespace(buffer=[torch.ones(10)])
        each = ([torch.ones(10)], {0: [torch.ones(10)], 1: None}, {torch.bfloat16: bucket})
        engine.optimizer = SimpleNamespace(**dict(zip(names, each, strict=True)))
        peer.label_states()
        held = meter.held()
    assert held["optimizer_states"] == held["gradients"] == held["temporary"] == size
    assert held["other"] == 3 * (40 - size)


def test_a_peer_on_one_rank_sends_nothing(world_of):
    compared = measure_peer("fsdp2", 1, world_of(1))
    assert compared.equal
    assert set(compared.sent_bytes["measured"].values()) == {0}


def test_fully_shard_holds_8_bytes_a_parameter_on_two_ranks(world_of):
    compared = measure_peer("fsdp2", 2, world_of(2))
    assert compared.held_bytes["measured"]["total"] / compared.params == pytest.approx(8, rel=0.01)


def a_dtensor_under_the_meter():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    with Meter() as meter:
        whole = distribute_tensor(torch.zeros(100, 3), mesh, [Shard(0)])
        moments = torch.zeros_like(whole)
        held = meter.held()["total"]
    return held, moments.to_local().nbytes


def test_a_dtensor_is_counted_by_what_this_rank_holds_of_it(world_of):
    assert world_of(2).run(a_dtensor_under_the_meter) == [(2 * 600, 600)] * 2


def all_reduce_in_pairs():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    pair = init_device_mesh("cpu", (2, 2)).get_group(1)
    with Meter() as meter:
        dist.all_reduce(torch.ones(8), group=pair)
        dist.all_reduce(torch.ones(8))
    return meter.sent_bytes()["all_reduce"]


def test_a_collective_is_booked_with_the_size_of_its_own_group(world_of):
    assert world_of(4).run(all_reduce_in_pairs) == [2 * 32 // 2 + 2 * 32 * 3 // 4] * 4


def many_collectives_at_once():
    import torch.distributed as dist

    group = dist.distributed_c10d._get_default_group()
    wholes, parts = [torch.ones(8), torch.ones(12)], [torch.ones(4), torch.ones(6)]
    with Meter() as meter:
        group.allgather_into_tensor_coalesced(wholes, parts).wait()
    return meter.sent_bytes()["all_gather"]


def test_gathers_that_were_made_one_call_are_booked_as_each_alone(world_of):
    assert world_of(2).run(many_collectives_at_once) == [4 * (4 + 6)] * 2


def test_wire_bytes_show_what_gloo_s_reduce_scatter_costs(world_of):
    compared = measure_peer("fsdp2", 2, world_of(2))
    if compared.wire_bytes is None:
        pytest.skip(str(compared.wire_reason))
    logical = compared.sent_bytes["measured"]
    twice = logical["total"] + logical["reduce_scatter"]
    thrice = twice + logical["reduce_scatter"]
    assert twice <= compared.wire_bytes < thrice, "headers and acknowledgements add a few percent"


def test_the_command_shows_a_peer_with_the_contract_s_keys(capsys):
    assert main(["measure", "--peer", "zero-redundancy", "--ranks", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    keys = {"ranks", "params", "held_bytes", "sent_bytes", "wire_bytes", "peak_bytes", "equal"}
    assert set(shown) >= keys
    assert (shown["stage"], shown["named"]) == (1, "stage 1 that all-reduces")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--peer fsdp3 --ranks 2", "choose one of ddp"),
        ("--peer ddp --ranks 0", "at least 1"),
        ("--peer ddp --ranks 2 --steps 5", "--steps"),
        ("--peer ddp --stage 0 --ranks 2", "--stage or --peer"),
        ("--peer ddp --ranks 2 --recipe adamw-fp32", "--recipe"),
    ],
)
def test_a_peer_that_cannot_be_measured_gets_one_sentence(capsys, line, words):
    assert main(f"measure {line}".split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_deepspeed_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for stage in (1, 2, 3):
        monkeypatch.delitem(PEERS, f"deepspeed-{stage}", raising=False)
        with pytest.raises(ValueError, match="DeepSpeed, which is not installed here"):
            peer_named(f"deepspeed-{stage}")


def test_deepspeed_is_told_to_keep_no_parameter_whole_at_stage_3(monkeypatch):
    asked = []

    def initialize(model, config, **_):
        asked.append(config["zero_optimization"])
        return (model,)

    monkeypatch.setattr(peers, "HAS_DEEPSPEED", True)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    for stage in (2, 3):
        peers.DeepSpeed(GPT(), stage)
    of_stage_3 = [{n: v for n, v in zero.items() if n.startswith("stage3_")} for zero in asked]
    assert [zero["stage"] for zero in asked] == [2, 3]
    assert of_stage_3[0] == {}
    assert set(of_stage_3[1].values()) == {0}
    kept = {"stage3_param_persistence_threshold", "stage3_max_live_parameters"}
    assert kept < set(of_stage_3[1])


def test_every_peer_has_its_rule():
    assert set(PEERS) - set(RULES) == set()
    assert ("deepspeed-3" in PEERS) == HAS_DEEPSPEED
