"""Peers under the meter of the stages: derived by their own rule of who owns what, and counted."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from zerolab.cli import main
from zerolab.course.beside import RULES, measure_peer
from zerolab.practice import peers
from zerolab.practice.gpt import GPT
from zerolab.practice.meter import Meter
from zerolab.practice.peers import HAS_DEEPSPEED, PEERS, peer_named

OURS = [name for name in PEERS if not name.startswith("deepspeed")]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("peer", OURS)
def test_a_peer_holds_and_sends_what_its_rule_derives(world_of, peer, ranks):
    compared = measure_peer(peer, ranks, world_of(ranks))
    assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
    assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
    assert compared.equal
    assert 0 < compared.besides_bytes < 200  # counters of steps


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
    assert compared.wire_bytes == pytest.approx(twice, rel=0.05)


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
