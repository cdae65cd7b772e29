"""A thousand ranks: what a dry run counts is derived, for models that no laptop holds."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_dry_run import GPT, LLAMA, SMALL, STAGES

from zerolab.cli import main
from zerolab.course import thousand
from zerolab.course.thousand import dry_measure, side_by_side
from zerolab.practice.architectures import Decoder, architecture
from zerolab.practice.dry_run import OneBookingComm
from zerolab.theory.catalog import MODELS


@pytest.mark.parametrize(
    ("model", "ranks"),  # the largest on 1,024 ranks: at the end of this file
    [("llama2-7b", 8), ("llama2-70b", 64)],
)
def test_counted_is_derived_for_models_that_no_laptop_holds(model, ranks):
    compared = dry_measure(model, ranks, stage=3)
    assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
    assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
    assert compared.equal
    assert compared.params == MODELS[model].params


@pytest.fixture
def two_layers(monkeypatch):
    """Of each model the first two layers, as all others are like them."""

    def cut(name):
        return replace(architecture(name), layers=2)

    monkeypatch.setattr(thousand, "architecture", cut)


@pytest.mark.parametrize("model", ["llama2-7b", "llama2-70b", "gpt3-175b"])
@pytest.mark.parametrize(
    ("ranks", "stage"), [(64, 0), (64, 1), (64, 2), (8, 3), (64, 3), (1024, 3)]
)
def test_counted_is_derived_at_all_stages_of_their_layers(two_layers, model, ranks, stage):
    compared = dry_measure(model, ranks, stage)
    assert compared.equal
    assert compared.params == sum(MODELS[model].units[:3])


@pytest.fixture
def small_models(monkeypatch):
    both = {a.name: a for a in (GPT, LLAMA)}
    monkeypatch.setattr(thousand, "architecture", both.__getitem__)


@SMALL
@STAGES
def test_counted_is_derived_where_a_step_has_two_micro_batches(small_models, small, stage):
    assert dry_measure(small.name, 64, stage, tokens=9, micro_batches=2).equal


@SMALL
@pytest.mark.parametrize(
    ("peer", "ranks"), [("fsdp2", 4), ("fsdp2", 8), ("fsdp2", 20), ("fsdp2-no-reshard", 8)]
)
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


LINE = "measure --dry-run --model {} --ranks 8 {} --tokens 16 --json"


def test_the_command_prints_the_contract_s_object(capsys):
    shown = expect_object(capsys, LINE.format("gpt2", "--stage 3"))
    assert (shown["stage"], shown["peer"], shown["params"]) == (3, None, 124_439_808)


def test_the_command_prints_a_peer_s_object_too(capsys, small_models):
    shown = expect_object(capsys, LINE.format(LLAMA.name, "--peer fsdp2"))
    assert (shown["stage"], shown["peer"]) == (None, "fsdp2")
    # 19 rows become 24, 12 become 16, 4 become 8 and 23 become 24; two blocks
    blocks = 2 * (2 * 4 + 4 * 4 * 12 + 2 * 12 + 4 * 23)
    assert shown["padding"] == 2 * 5 * 12 + 4 + blocks


def test_the_command_exits_with_1_where_counted_is_not_derived(capsys, monkeypatch, small_models):
    monkeypatch.setattr(OneBookingComm, "_hand_over", lambda *_: None)
    code = main(LINE.format(GPT.name, "--stage 1").removesuffix(" --json").split())
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
        ("--model gpt2 --ranks 8 --peer ddp", "'ddp' has no dry run: choose fsdp2 or"),
        ("--model gpt2 --ranks 8 --peer zero-redundancy", "without --dry-run"),
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the most from")
def test_a_dry_run_of_175_billion_parameters_is_derived_and_needs_half_a_gigabyte_at_most():
    program = (  # not ru_maxrss: a child begins with the most that its parent had
        "import json; from zerolab.course.thousand import dry_measure;"
        "print(json.dumps(dry_measure('gpt3-175b', 1024, 3).as_dict()));"
        "print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    shown, _, status = done.stdout.partition("\n")
    compared = json.loads(shown or "{}")
    assert compared.get("equal"), done.stderr
    assert compared["params"] == MODELS["gpt3-175b"].params
    for what in ("held_bytes", "sent_bytes"):
        assert compared[what]["predicted"] == compared[what]["measured"]
    (most_kib,) = re.findall(r"VmHWM:\s*(\d+) kB", status)
    assert int(most_kib) * 1024 < 500e6


def test_a_dry_run_loads_no_compiler_and_leaves_torch_as_it_was():
    program = (
        "import sys, torch; from torch import nn; import torch.utils.checkpoint as c;"
        "from zerolab.course.thousand import dry_measure;"
        "before = {**vars(nn.init)}, nn.functional.scaled_dot_product_attention;"
        "plain = dry_measure('gpt2', 8, 3).as_dict();"
        "print('torch._dynamo' in sys.modules);"
        "print(before == (vars(nn.init), nn.functional.scaled_dot_product_attention));"
        "whole = dry_measure('gpt2', 8, 3, recompute=True);"  # asks the compiler for its settings
        "print('torch._dynamo' in sys.modules, torch._dynamo.is_compiling());"
        "print(hasattr(c.checkpoint.__wrapped__, '__dynamo_disable'));"
        "print(dry_measure('gpt2', 8, 3).as_dict() == plain)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "True", "False", "False", "True"], done.stderr
