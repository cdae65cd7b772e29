"""The command: what it prints, what it returns, and one sentence for what cannot be done."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.cli import main

ROOT = Path(__file__).resolve().parent.parent


def run(capsys, line):
    try:
        code = main(line.split())
    except SystemExit as stop:  # argparse
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_prints_the_contract_s_object(capsys):
    code, out, _ = run(capsys, "plan --params 7.5e9 --ranks 64 --stage 1 --json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["stage"], plan["ranks"], plan["params"]) == (1, 64, 7_500_000_000)
    assert plan["recipe"] == "adamw-mixed"
    assert plan["held_bytes"] == {
        "parameters": 15_000_000_000,
        "gradients": 15_000_000_000,
        "optimizer_states": 90_000_000_000 // 64,
        "total": 31_406_250_000,  # ZeRO paper, Table 1: 31.4 GB
    }
    assert plan["sent_bytes"] == {
        "all_reduce": 0,
        "reduce_scatter": 15_000_000_000 * 63 // 64,
        "all_gather": 15_000_000_000 * 63 // 64,
        "total": 30_000_000_000 * 63 // 64,
    }
    assert all(type(v) is int for part in ("held_bytes", "sent_bytes") for v in plan[part].values())
    assert type(plan["ranks"]) is type(plan["stage"]) is type(plan["params"]) is int


def test_plan_for_people_names_unit_and_recipe(capsys):
    code, out, _ = run(capsys, "plan --params 7.5e9 --ranks 64 --stage 1")
    assert code == 0
    assert "31.4" in out and "GB" in out and "adamw-mixed" in out


def test_measure_prints_the_contract_s_object(capsys):
    code, out, _ = run(capsys, "measure --stage 1 --ranks 2 --steps 2 --json")
    measured = json.loads(out)
    assert code == 0
    assert measured["equal"] is measured["same_weights_as_one_process"] is True
    assert measured["bitwise"] is True
    assert (measured["stage"], measured["ranks"], measured["padding"]) == (1, 2, 1)
    for part in ("held_bytes", "sent_bytes"):
        assert measured[part]["predicted"] == measured[part]["measured"]
    assert set(measured["held_bytes"]["measured"]) == {
        "parameters", "gradients", "optimizer_states", "total"}  # fmt: skip
    assert set(measured["sent_bytes"]["measured"]) == {
        "all_reduce", "reduce_scatter", "all_gather", "total"}  # fmt: skip
    assert measured["peak_bytes"] > measured["held_bytes"]["measured"]["total"]
    assert sum(measured["peak_by_kind"].values()) == measured["peak_bytes"]
    assert (measured["wire_bytes"] is None) == (measured["wire_reason"] is not None)


def test_measure_takes_what_a_stage_and_a_step_can_be_told(capsys):
    options = "--micro-batches 2 --max-norm 0.5 --overlap --prefetch --device-memory 2MB"
    code, out, _ = run(capsys, f"measure --stage 3 --ranks 2 --steps 1 --json {options}")
    measured = json.loads(out)
    assert code == 0
    assert measured["sent_bytes"]["measured"]["all_gather"] == 4 * 104_334  # 2 for each of two
    assert measured["control_bytes"] == 8  # the norm's square, to one other rank


def test_the_device_that_the_readme_names_is_too_small_without_offload_and_does_with_it(capsys):
    row = next(
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if "on a toy device that is" in line
    )
    command, *_, offload = re.findall(r"`(?:zerolab )?([^`]*)`", row)
    below, size = re.fullmatch(r"(--offload \S+) --device-memory \"(.*)\"", offload).groups()
    device = [*command.split(), "--steps", "1", "--device-memory", size]
    assert main(device) != 0
    assert "optimizer states" in capsys.readouterr().err
    assert main([*device, *below.split()]) == 0


def test_measure_in_fp16_says_that_the_loss_is_not_scaled(capsys):
    for recipe, said in (("adamw-mixed-fp16", True), ("adamw-mixed", False)):
        code, out, _ = run(capsys, f"measure --stage 1 --ranks 1 --steps 1 --recipe {recipe}")
        assert code == 0
        assert ("the loss is not scaled here" in out) == said


def test_measure_exits_with_1_when_derived_and_counted_differ(capsys, monkeypatch):
    import zerolab.course.measure as module

    def wrong(*arguments):
        return {**held_bytes(*arguments), "gradients": 1}

    held_bytes = module.held_bytes
    monkeypatch.setattr(module, "held_bytes", wrong)
    code, out, _ = run(capsys, "measure --stage 0 --ranks 1 --steps 1")
    assert code == 1
    assert "<- not the same" in out
    assert "derived equals counted on every rank: no" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --params -5 --ranks 4 --stage 1", "at least 1"),
        ("plan --params many --ranks 4 --stage 1", "not a number"),
        ("plan --params nan --ranks 4 --stage 1", "whole number"),
        ("plan --params 7.5 --ranks 4 --stage 1", "whole number"),
        ("plan --params 7e9 --ranks 0 --stage 1", "at least 1"),
        ("plan --params 7e9 --ranks 2.5 --stage 1", "whole number"),
        ("plan --params 7e9 --ranks 4 --stage 7", "7"),
        ("plan --params 7e9 --ranks 4 --stage 1 --recipe adamw-mixd", "adamw-mixed"),
        ("plan --ranks 4 --stage 1", "--params"),
        ("measure --stage 1 --ranks 0", "0"),
        ("measure --stage 1 --ranks -2", "-2"),
        ("measure --stage 1 --ranks 100000", "memory"),
        ("measure --stage 1 --ranks two", "two"),
        ("measure --stage 8 --ranks 2", "choose one of"),
        ("measure --stage 1 --ranks 2 --steps 0", "at least 1"),
        ("measure --stage 1 --ranks 2 --recipe adafactor", "adamw-mixed"),
        ("measure --stage 1 --ranks 2 --micro-batches 0", "at least 1"),
        ("measure --stage 1 --ranks 2 --clip 0", "above 0"),
        ("measure --stage 1 --ranks 2 --prefetch", "no prefetch: it begins with stage 3"),
        ("measure --stage 0 --ranks 2 --device-memory 1MB", "stage 1 would hold 626,004 bytes"),
        ("train --stage 0 --ranks 2 --device-memory 1MB", "stage 1 would hold 626,004 bytes"),
        ("measure --stage 1 --ranks 2 --device-memory 1e400", "must be more than 0"),
        ("measure --stage 1 --ranks 2 --offload optimizer=cpu,optimizer=disk", "twice"),
        ("measure --stage 1 --ranks 2 --offload-folder x", "needs --offload"),
        ("measure --stage 1 --ranks 2 --offload optimizer=cpu --time --steps 3", "out --steps"),
        ("doctor --json", "need --rates"),
        ("doctor --ranks 3", "need --rates"),
        ("lab --port 0", "from 1 to 65535, not 0"),
        ("lab --port 65536", "from 1 to 65535, not 65536"),
        ("fly", "fly"),
        ("", "COMMAND"),
    ],
)
def test_what_makes_no_sense_gets_one_sentence_and_exit_2(capsys, arguments, words):
    code, out, err = run(capsys, arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--cluster", ""], "zerolab: an argument after --cluster is empty"),
        (["train", "--stage", "1", "--checkpoint", " "], "after --checkpoint is empty"),
        (["measure", "--ranks", "2", "--stage", "1", "--offload="], "an argument is empty"),
        (["release", ""], "an argument is empty"),
    ],
)
def test_an_empty_word_is_a_variable_that_is_not_set(capsys, words, said):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert said in captured.err


def test_an_error_of_several_lines_is_said_in_one(capsys, monkeypatch):
    import zerolab.practice.doctor as module

    def broken():
        raise RuntimeError("first\n  second")

    monkeypatch.setattr(module, "examine", broken)
    assert run(capsys, "doctor") == (2, "", "zerolab doctor: first second\n")


def test_a_package_that_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "zerolab.theory.plan", None)
    code, out, err = run(capsys, "plan --params 7e9 --ranks 8 --stage 1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "zerolab.theory.plan" in err and "zerolab doctor says what is missing" in err


# ---- where what is printed goes


PLAN = f"{sys.executable} -m zerolab plan --params 7e9 --ranks 8 --stage 1"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"{PLAN} --why | true", 141, ""),
        (f"{PLAN} --stage 9 2>&1 | true", 2, ""),
        (f"{PLAN} > /dev/full", 2, "zerolab plan: [Errno 28] No space left on device\n"),
        (f"{PLAN} >&-", 0, ""),
        (f"{PLAN} > /dev/null 2>&-", 0, ""),
        (f"{PLAN} --stage 9 2>&-", 2, ""),
        (f"{PLAN} --stage 9 2> /dev/full", 2, ""),
        (f"{sys.executable} -m zerolab plan --nonsense 2> /dev/full", 2, ""),
        (f"{PLAN} > /dev/null <&-", 0, ""),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_wherever_the_output_goes_the_end_is_quiet_or_a_sentence(line, code, said, unbuffered):
    # a pipe's reader has gone before the first word is printed; its writer's code is told
    line = line.replace("| true", "| (exec <&-; sleep 1)")
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert (done.returncode, done.stderr) == (code, said)
    assert "Traceback" not in done.stdout


def test_progress_that_nobody_hears_ends_a_training_quietly():
    line = f"{sys.executable} -m zerolab train --stage 0 --ranks 1 --steps 100000 --every 1"
    done = subprocess.run(
        ["bash", "-c", f"{line} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (141, "")
    assert done.stdout.startswith("step 1 of 100,000")


def test_doctor_says_a_line_each_and_all_is_well_here(capsys):
    code, out, _ = run(capsys, "doctor")
    lines = out.splitlines()
    assert code == 0, out
    assert all(line.startswith("ok ") for line in lines)
    for word in ("Python", "torch", "cores", "memory", "ranks", "ports"):
        assert any(word in line for line in lines)


def test_the_readme_s_example_is_what_the_command_prints(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, block = readme.split("$ zerolab ", 1)
    command, _, shown = block.split("```")[0].partition("\n")
    code, out, _ = run(capsys, command)
    assert code == 0
    assert out.startswith(shown.rstrip())


def test_python_m_zerolab_is_the_same_command():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "zerolab",
            "plan",
            "--params",
            "1e9",
            "--ranks",
            "2",
            "--stage",
            "0",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "16" in done.stdout


INTERRUPTED = """
import runpy, sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == "zerolab.commands.train":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
runpy.run_module("zerolab", run_name="__main__")
"""


def test_ctrl_c_while_the_command_is_imported_is_one_line():
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "zerolab: stopped\n")
