"""A thousand ranks: what is counted without memory is derived, and is what real ranks count."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zerolab.cli import main
from zerolab.course import thousand
from zerolab.course.thousand import dry_measure, side_by_side
from zerolab.practice import dry_run
from zerolab.practice.architectures import ARCHITECTURES, Architecture, Decoder, architecture
from zerolab.practice.comm import Comm
from zerolab.practice.dry_run import DryJob, OneBookingComm, dry_count
from zerolab.practice.gpt import num_parameters
from zerolab.practice.meter import KINDS
from zerolab.theory.catalog import MODELS

GPT = Architecture("small-gpt", 3, 12, 2, 11, 16, tied=True)
LLAMA = Architecture("small-llama", 2, 12, 6, 19, 16, gated=True, ffn=23, kv_heads=2)
SMALL = pytest.mark.parametrize("small", [GPT, LLAMA], ids=lambda a: a.name)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PEERS = pytest.mark.parametrize("peer", ["fsdp2", "fsdp2-no-reshard"])


def small_job(small, ranks, **more):
    return DryJob(small, ranks, **{"tokens": 9, **more})


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
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_one_booking_counts_what_n_minus_1_sends_count(monkeypatch, small, stage, ranks):
    job = small_job(small, ranks, stage=stage, rank=ranks - 1, micro_batches=2)
    booked = dry_count(job)
    monkeypatch.setattr(dry_run, "OneBookingComm", Comm)
    assert dry_count(job) == booked
    assert booked.sent["total"] > 0 or ranks == 1


def count_for_real(small, stage, peer):
    from zerolab.practice.measure import STAGES
    from zerolab.practice.meter import Meter, hear_resizes
    from zerolab.practice.peers import PEERS

    with Meter() as meter, hear_resizes(meter):
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
        assert (dry.held, dry.sent) == real[:2]
        assert 0 <= dry.peak - real[2] <= 8  # a fake scalar lives a moment longer


@SMALL
@PEERS
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_dry_run_of_fully_shard_counts_what_real_ranks_count(world_of, small, peer, ranks):
    for rank, real in enumerate(world_of(ranks).run(count_for_real, small, None, peer)):
        dry = dry_count(small_job(small, ranks, peer=peer, rank=rank))
        assert {kind: dry.held[kind] for kind in KINDS} == {kind: real[0][kind] for kind in KINDS}
        assert dry.sent == real[1]


@pytest.mark.parametrize("ranks", [8, 1024])
@pytest.mark.parametrize("model", ["llama2-7b", "llama2-70b", "gpt3-175b"])
def test_counted_is_derived_for_models_that_no_laptop_holds(model, ranks):
    compared = dry_measure(model, ranks, stage=3)
    assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
    assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
    assert compared.equal
    assert compared.params == MODELS[model].params


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_counted_is_derived_at_the_other_stages(stage):
    assert dry_measure("llama2-7b", 64, stage, micro_batches=2).equal


@pytest.fixture
def small_models(monkeypatch):
    both = {a.name: a for a in (GPT, LLAMA)}
    monkeypatch.setattr(thousand, "architecture", both.__getitem__)


@SMALL
@PEERS
@pytest.mark.parametrize("ranks", [4, 8, 20])
def test_fully_shard_holds_what_its_rule_of_rows_derives(small_models, small, peer, ranks):
    for rank in (0, ranks - 1):
        compared = dry_measure(small.name, ranks, peer=peer, rank=rank, tokens=9)
        assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
        assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
        assert compared.equal
        assert (compared.empty_shards > 0) == (ranks > 4)
        assert compared.times_fair > 1 or rank


@pytest.mark.parametrize(
    ("model", "bytes_per_fair_share"), [("gpt3-175b", "16.001"), ("llama2-7b", "16.174")]
)
def test_rows_that_n_does_not_divide_make_shards_larger(model, bytes_per_fair_share):
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in Decoder(architecture(model)).parameters()]
    params = MODELS[model].params
    held = 16 * sum(thousand._rows(shape, 1024, 0) for shape in shapes)
    assert f"{held * 1024 / params:.3f}" == bytes_per_fair_share
    uneven = thousand._uneven(shapes, 1024)
    assert {row.rows % 1024 for row in uneven} != {0}
    assert 16 * params + 1024 * sum(row.bytes_over_share for row in uneven) == held * 1024


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
    by_ranks = {n: operations(monkeypatch, small_job(of_layers(2), n)) for n in (8, 64, 1024)}
    monkeypatch.undo()
    assert len(set(by_ranks.values())) == 1
    two, four, six = (
        operations(pytest.MonkeyPatch(), small_job(of_layers(n), 8)) for n in (2, 4, 6)
    )
    assert six - four == pytest.approx(four - two, rel=0.02)


@STAGES
def test_the_peak_is_split_by_kind_and_by_module(stage):
    seen = dry_count(small_job(LLAMA, 4, stage=stage))
    assert sum(seen.peak_by_kind.values()) == seen.peak == max(seen.modules.values())
    phases = {f"{unit}, {phase}" for unit in ("embedding", "blocks.0", "blocks.1", "head")
              for phase in ("forward", "backward")}  # fmt: skip
    assert set(seen.modules) >= phases


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


def test_the_table_has_the_formula_both_counts_and_what_calculators_say(small_models):
    table = side_by_side(LLAMA.name, 20)
    by_how = {how: [row for row in table if row.how == how] for how in
              ("derived", "counted", "claimed")}  # fmt: skip
    assert [row.num_bytes for row in by_how["derived"][1:]] == [
        row.num_bytes for row in by_how["counted"]
    ]
    assert "rows" in by_how["counted"][1].why
    assert any("DeepSpeed" in row.who for row in by_how["claimed"])
    assert all(row.why for row in table)


CONTRACT = {
    "stage", "ranks", "params", "padding", "held_bytes", "sent_bytes", "wire_bytes", "wire_reason",
    "peak_bytes", "equal", "same_weights_as_one_process", "bitwise", "dry_run", "empty_shards",
}  # fmt: skip


def expect_object(capsys, line):
    code = main(line.split())
    shown = json.loads(capsys.readouterr().out)
    assert code == 0
    assert set(shown) >= CONTRACT
    assert shown["dry_run"] is shown["equal"] is True
    assert shown["wire_bytes"] is None and shown["wire_reason"]
    assert shown["bitwise"] is shown["same_weights_as_one_process"] is None
    assert shown["peak_bytes"] > shown["held_bytes"]["measured"]["total"]
    return shown


def test_the_command_prints_the_contract_s_object(capsys):
    line = "measure --dry-run --model gpt2 --ranks 8 --stage 3 --tokens 16 --json"
    shown = expect_object(capsys, line)
    assert (shown["stage"], shown["peer"], shown["params"]) == (3, None, 124_439_808)
    shown = expect_object(capsys, line.replace("--stage 3", "--peer fsdp2"))
    assert (shown["stage"], shown["peer"], shown["padding"]) == (None, "fsdp2", 5376)


def test_the_command_exits_with_1_where_counted_is_not_derived(capsys, monkeypatch):
    monkeypatch.setattr(OneBookingComm, "_hand_over", lambda *_: None)
    line = "measure --dry-run --model gpt2 --ranks 8 --stage 1 --tokens 16"
    code = main(line.split())
    assert code == 1
    assert "<- not the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model gpt2 --ranks 200000000 --stage 3", "more than the 124,439,808 parameters"),
        ("--model gpt2 --ranks 200000000 --peer fsdp2", "more than the 124,439,808 parameters"),
        ("--model gtp3-175 --ranks 8 --stage 3", "gpt3-175b"),
        ("--model mixtral-8x7b --ranks 8 --stage 3", "cannot be built"),
        ("--model gpt2 --ranks 8 --stage 7", "7"),
        ("--model gpt2 --ranks 0 --stage 3", "at least 1"),
        ("--model gpt2 --ranks 8 --stage 3 --rank 8", "the last is 7"),
        ("--model gpt2 --ranks 8 --stage 3 --tokens 0", "at least 1"),
        ("--model gpt2 --ranks 8 --stage 3 --tokens 2000", "1,024"),
        ("--model gpt2 --ranks 8 --stage 3 --steps 4", "--steps"),
        ("--model gpt2 --ranks 8 --peer ddp", "fsdp2"),
        ("--model gpt2 --ranks 8 --peer fsdp2 --recipe adamw-fp32", "--recipe"),
        ("--model gpt2 --ranks 8 --stage 3 --recipe adamm", "adamw-mixed"),
        ("--model gpt2 --ranks 8 --stage 1 --overlap", "begins with stage 2"),
        ("--model gpt2 --ranks 8 --stage 3 --clip 1", "--clip"),
        ("--model gpt2 --ranks 8 --peer fsdp2 --prefetch", "--prefetch"),
        ("--model gpt2 --ranks 8", "--peer"),
        ("--ranks 8 --stage 3", "--model"),
    ],
)
def test_a_dry_run_that_makes_no_sense_gets_one_sentence(capsys, arguments, words):
    code = main(f"measure --dry-run {arguments}".split())
    captured = capsys.readouterr()
    assert code == 2
    assert words in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_only_a_dry_run_takes_a_model(capsys):
    assert main(["measure", "--ranks", "2", "--stage", "1", "--model", "gpt2"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "missing", ["torch.testing._internal.distributed.fake_pg", "torch._subclasses.fake_tensor"]
)
def test_a_torch_without_the_private_parts_is_named_and_nothing_stays(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeError, match=r"torch 2\.\d+.* All else in the course runs"):
        dry_count(small_job(GPT, 4))
    monkeypatch.undo()
    assert dry_count(small_job(GPT, 4)).params > 0


def dry_run_on_a_rank():
    dry_count(small_job(GPT, 4))


def test_ranks_cannot_start_a_dry_run(world_of):
    with pytest.raises(RuntimeError, match="start it outside of ranks"):
        world_of(2).run(dry_run_on_a_rank)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the most from")
def test_a_dry_run_of_175_billion_parameters_needs_half_a_gigabyte_at_most():
    program = (  # not ru_maxrss: a child begins with the most that its parent had
        "from zerolab.course.thousand import dry_measure;"
        "print(dry_measure('gpt3-175b', 1024, 3).equal);"
        "print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    equal, _, status = done.stdout.partition("\n")
    assert equal == "True", done.stderr
    (most_kib,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
    assert int(most_kib) * 1024 < 500e6
