"""A dry run: what is counted without memory is what real ranks count, at a cost that stays."""

import sys

import pytest
import torch

from zerolab.practice import dry_run
from zerolab.practice.architectures import ARCHITECTURES, Architecture, Decoder, architecture
from zerolab.practice.comm import Comm
from zerolab.practice.dry_run import DryJob, dry_count
from zerolab.practice.gpt import num_parameters
from zerolab.practice.meter import KINDS
from zerolab.practice.nowhere import EqualPieces
from zerolab.theory.catalog import MODELS

GPT = Architecture("small-gpt", 3, 12, 2, 11, 16, tied=True)
LLAMA = Architecture("small-llama", 2, 12, 6, 19, 16, gated=True, ffn=23, kv_heads=2)
WIDER = Architecture("wider-llama", 2, 24, 6, 19, 16, gated=True, ffn=23, kv_heads=2)
SMALL = pytest.mark.parametrize("small", [GPT, LLAMA], ids=lambda a: a.name)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PEERS = pytest.mark.parametrize("peer", ["fsdp2", "fsdp2-no-reshard"])


def small_job(small, ranks, **more):
    return DryJob(small, ranks, **{"tokens": 9, **more})


@pytest.mark.parametrize("shape", [(12, 5), (13, 5), (5, 7), (1, 3), (1024, 2), (1025, 2), (9,)])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 12, 1000])
def test_equal_pieces_of_a_tensor_without_memory_are_one_and_all_have_torch_s_shapes(shape, chunks):
    for dim in range(len(shape)):
        whole = torch.empty(shape, device="meta")
        right = torch.chunk(whole, chunks, dim=dim)
        with EqualPieces():
            pieces = torch.chunk(whole, chunks, dim=dim)
        of = [[(p.shape, p.stride(), p.untyped_storage()._cdata) for p in each]
              for each in (pieces, right)]  # fmt: skip
        assert of[0] == of[1]
        assert len({id(piece) for piece in pieces}) <= 2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_the_parameters_that_theory_derives(name):
    with torch.device("meta"):
        built = Decoder(architecture(name))
    assert num_parameters(built) == MODELS[name].params
    blocks = [num_parameters(block) for block in built.blocks]
    assert blocks == list(MODELS[name].units[1:])


def test_every_dense_model_of_the_catalog_can_be_built():
    assert set(MODELS) - set(ARCHITECTURES) == {"mixtral-8x7b"}


@SMALL
@STAGES
@pytest.mark.parametrize("ranks", [1, 8])
def test_one_booking_counts_what_n_minus_1_sends_count(monkeypatch, small, stage, ranks):
    job = small_job(small, ranks, stage=stage, rank=ranks - 1, micro_batches=2)
    fakes = dry_run.fake_tensors()  # torch's fake group takes these from a Comm, and no meta ones
    monkeypatch.setattr(dry_run, "nowhere", lambda: fakes)
    booked = dry_count(job)
    monkeypatch.setattr(dry_run, "OneBookingComm", Comm)
    assert dry_count(job) == booked
    assert booked.sent["total"] > 0 or ranks == 1


def count_for_real(small, stage, peer):
    from zerolab.practice.measure import STAGES
    from zerolab.practice.meter import Meter, hear_resizes
    from zerolab.practice.peers import PEERS

    with Meter() as meter, hear_resizes(meter):
        torch.manual_seed(0)
        model = Decoder(small)
        engine = PEERS[peer](model) if peer else STAGES[stage](model, Comm())
        for _ in range(2):
            meter.sent.clear()
            meter.reset_peak()
            tokens = torch.zeros(1, 9, dtype=torch.long)
            loss = (engine if peer else model).loss(tokens, tokens)
            engine.backward(loss / 1)
            del loss, tokens
            if peer:
                engine.label_states()
            held = meter.held()
            engine.step()
    return held, meter.sent_bytes(), meter.peak


@SMALL
@STAGES
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_dry_run_counts_what_real_ranks_count(world_of, small, stage, ranks):
    for rank, real in enumerate(world_of(ranks).run(count_for_real, small, stage, None)):
        dry = dry_count(small_job(small, ranks, stage=stage, rank=rank))
        assert (dry.held, dry.sent, dry.peak) == real


def test_heads_of_more_than_two_numbers_attend_as_on_real_ranks(world_of):
    """Those of two lie so in memory that a CPU takes attention apart."""
    for rank, real in enumerate(world_of(2).run(count_for_real, WIDER, 3, None)):
        assert dry_count(small_job(WIDER, 2, rank=rank)).peak == real[2]


@SMALL
@pytest.mark.parametrize(("peer", "ranks"), [("fsdp2", 2), ("fsdp2", 3), ("fsdp2-no-reshard", 3)])
def test_a_dry_run_of_fully_shard_counts_what_real_ranks_count(world_of, small, peer, ranks):
    for rank, real in enumerate(world_of(ranks).run(count_for_real, small, None, peer)):
        dry = dry_count(small_job(small, ranks, peer=peer, rank=rank))
        assert {kind: dry.held[kind] for kind in KINDS} == {kind: real[0][kind] for kind in KINDS}
        assert dry.sent == real[1]


def operations(monkeypatch, job):
    seen = []
    dispatch = dry_run.ModuleMeter.__torch_dispatch__

    def counting(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(dry_run.ModuleMeter, "__torch_dispatch__", counting)
    dry_count(job)
    return len(seen)


def of_layers(layers):
    # odd sizes: no shard is a multiple of the 64 elements that AdamW takes at a time
    return Architecture("wide", layers, 2056, 2, 4099, 16, gated=True, ffn=4097, kv_heads=2)


def test_the_cost_grows_with_layers_and_not_with_ranks(monkeypatch):
    def of(layers, ranks):
        with monkeypatch.context() as patch:
            return operations(patch, small_job(of_layers(layers), ranks))

    two, four, six = (of(layers, 8) for layers in (2, 4, 6))
    assert of(2, 64) == of(2, 1024) == two
    assert six - four == pytest.approx(four - two, rel=0.02)


@STAGES
def test_the_peak_is_split_by_kind_and_by_module(stage):
    seen = dry_count(small_job(LLAMA, 4, stage=stage))
    assert sum(seen.peak_by_kind.values()) == seen.peak == max(seen.modules.values())
    phases = {f"{unit}, {phase}" for unit in ("embedding", "blocks.0", "blocks.1", "head")
              for phase in ("forward", "backward")}  # fmt: skip
    assert set(seen.modules) == phases | {"before forward", "the optimizer's step"}


@PEERS
def test_torch_s_own_tracker_finds_the_peak_that_our_meter_finds(peer):
    for small in (GPT, LLAMA):
        seen = dry_count(small_job(small, 4, peer=peer))
        assert seen.peak_by == "torch's FSDPMemTracker"
        assert sum(seen.peak_by_kind.values()) == seen.peak


def test_without_torch_s_tracker_our_meter_splits_the_peak(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed._tools.fsdp2_mem_tracker", None)
    seen = dry_count(small_job(GPT, 4, peer="fsdp2"))
    assert seen.peak_by == "zerolab's meter"
    assert sum(seen.peak_by_kind.values()) == seen.peak


@pytest.mark.parametrize("how", [{"stage": 3}, {"peer": "fsdp2"}])
def test_recomputation_lowers_the_peak_and_sends_the_same(how):
    deep = Architecture("deep", 8, 12, 2, 11, 64)
    kept = dry_count(small_job(deep, 4, tokens=64, **how))
    again = dry_count(small_job(deep, 4, tokens=64, recompute=True, **how))
    assert again.peak < 0.6 * kept.peak
    assert (again.held, again.sent) == (kept.held, kept.sent)


@pytest.mark.parametrize(
    "missing", ["torch.testing._internal.distributed.fake_pg", "torch._subclasses.fake_tensor"]
)
def test_a_torch_without_the_private_parts_is_named_and_nothing_stays(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeError, match=r"torch 2\.\d+.* All else in the course runs"):
        dry_count(small_job(GPT, 4, peer="fsdp2"))
    monkeypatch.undo()
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    with pytest.raises(RuntimeError, match="has no kernel of a CPU for attention"):
        dry_count(small_job(GPT, 4))
    monkeypatch.undo()
    assert dry_count(small_job(GPT, 4)).params > 0


def dry_run_on_a_rank():
    dry_count(small_job(GPT, 4))


def test_ranks_cannot_start_a_dry_run(world_of):
    with pytest.raises(RuntimeError, match="start it outside of ranks"):
        world_of(2).run(dry_run_on_a_rank)
