"""zerolab plan: what each option changes, and one sentence for each thing that cannot be."""

import json
import subprocess
import sys

import pytest

from zerolab.cli import main
from zerolab.course import oracles
from zerolab.theory.catalog import LINKS
from zerolab.theory.memory import RECIPES
from zerolab.theory.plan import plan
from zerolab.theory.strategy import Strategy

CONTRACT = {"stage", "ranks", "params", "recipe", "held_bytes", "sent_bytes"}
LLAMA = "--model llama2-7b --cluster dgx-a100"


@pytest.fixture
def run(capsys):
    def call(line):
        try:
            code = main(["plan", *line.split()])
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def answer(run):
    def call(line):
        code, out, err = run(f"{line} --json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def test_help_groups_the_options(run):
    code, out, _ = run("--help")
    assert code == 0
    titles = ("the model", "the machine", "the strategy", "the answer")
    places = [out.index(f"\n{title}") for title in titles]
    assert places == sorted(places)


def test_the_command_starts_without_sympy():
    code = "import sys, zerolab.cli; sys.exit('sympy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_named_model_on_named_nodes_is_the_theory_s_plan(answer):
    shown = answer(f"{LLAMA} --nodes 2 --stage 3 --recompute full")
    assert set(shown) >= CONTRACT
    from zerolab.theory.catalog import cluster

    p = plan("llama2-7b", cluster("dgx-a100", 2), Strategy(3, recompute="full"))
    assert (shown["ranks"], shown["params"]) == (16, 6738415616)
    assert (shown["held_bytes"], shown["sent_bytes"]) == (p.held, p.sent)
    assert (shown["step_s"], shown["bound"]) == (p.timeline.total_s, p.timeline.bound)
    assert [fit["verdict"] for fit in shown["fits"]] == [fit.verdict for fit in p.fits]


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ("--recipe adamw-fp32", "recipe", "adamw-fp32"),
        ("--micro-batch 4", "micro_batch", 4),
        ("--accumulation 3", "accumulation", 3),
        ("--sequence 1024", "sequence", 1024),
        ("--recompute selective", "recompute", "selective"),
        ("--group 4", "group", 4),
        ("--tensor-parallel 2", "tensor_parallel", 2),
        ("--frozen 6e9", "frozen", 6_000_000_000),
        ("--tied", "tied", True),
        ("--no-tied", "tied", False),
        ("--offload optimizer=cpu", "optimizer_on", "cpu"),
        ("--offload parameters=nvme", "parameters_on", "nvme"),
        ("--recompute full --offload checkpoints=cpu", "checkpoints_on", "cpu"),
    ],
)
def test_each_option_of_the_strategy_reaches_the_plan(answer, options, field, value):
    shown = answer(f"{LLAMA} --stage 3 {options}")
    also = {"recompute": "full"} if field == "checkpoints_on" else {}
    p = plan("llama2-7b", "dgx-a100", Strategy(3, **{field: value, **also}))
    assert shown["held_bytes"] == p.held and shown["sent_bytes"] == p.sent
    assert shown["tiers"] == p.tiers and shown["step_s"] == p.timeline.total_s
    assert [r["low"] for r in shown["residuals"]] == [r.low for r in p.residuals]
    assert [r["tier"] for r in shown["residuals"]] == [r.tier for r in p.residuals]


def test_untying_a_tied_model_adds_a_table(answer):
    tied, untied = (answer(f"--model gpt2 --ranks 1 --stage 0 {o}") for o in ("", "--no-tied"))
    assert untied["params"] - tied["params"] == 50257 * 768


def test_several_states_may_leave_the_gpu(run, answer):
    line = "--model gpt3-175b --device a100-80 --ranks 8 --stage 3 --recompute full --cpu-memory "
    line += "2e12 --nvme 28e12 --offload optimizer=nvme,parameters=cpu"
    shown = answer(line)
    assert shown["tiers"] == {
        "parameters": "cpu", "gradients": "cpu", "optimizer_states": "nvme"}  # fmt: skip
    capacities = {fit["tier"]: fit["capacity_bytes"] for fit in shown["fits"]}
    assert capacities == {"gpu": 80 * 10**9, "cpu": 2 * 10**12, "nvme": 28 * 10**12}
    _, out, _ = run(line)
    assert "nvme of a node: 2,095.25 GB to 2,095.25 GB of 28,000.00 GB: fits" in out
    row = next(line.split() for line in out.splitlines() if "optimizer_states" in line)
    assert " ".join(row) == "held optimizer_states 261,906,388,992 B 261.906 GB nvme"


def test_capacities_replace_those_of_a_known_node(answer):
    shown = answer(f"{LLAMA} --stage 1 --offload optimizer=cpu --cpu-memory 64e9")
    assert [fit["capacity_bytes"] for fit in shown["fits"]] == [80 * 10**9, 64 * 10**9]
    assert [fit["verdict"] for fit in shown["fits"]][1] == "does not fit"


def test_a_device_is_one_gpu_unless_ranks_are_given(answer):
    assert answer("--model gpt2 --device v100-32 --stage 0")["ranks"] == 1
    assert answer("--model gpt2 --device v100-32 --nodes 4 --stage 1")["ranks"] == 4
    shown = answer("--model gpt2 --device v100-32 --ranks 8 --nodes 4 --stage 1")
    assert (shown["ranks"], shown["step_s"]) == (8, None), "between nodes no speed is known"
    assert answer("--model gpt2 --device v100-32 --ranks 8 --nodes 4 --stage 1 --link 1e9")[
        "step_s"
    ]


@pytest.mark.parametrize(("stage", "ms"), [(0, 61.25), (3, 91.875)])
def test_the_link_s_rate_is_one_way(run, answer, stage, ms):
    """Exercise 3 of the lecture: 7B over 8 ranks at 400 GB/s."""
    line = f"--params 7e9 --ranks 8 --stage {stage} --link"
    assert answer(f"{line} 400e9")["sent_s"] * 1000 == pytest.approx(ms)
    named = answer(f"{line} nvlink3")["sent_s"]
    assert named * LINKS["nvlink3"].bytes_per_s == pytest.approx(ms / 1000 * 400e9)
    assert f"sent in {ms / 1000:.3f} s at the link's rate" in run(f"{line} 400e9")[1]


def test_what_does_not_fit_is_told_what_to_try(run, answer):
    code, out, _ = run(f"{LLAMA} --stage 2")
    assert code == 0
    assert "does not fit" in out
    assert "What to try next:\n  --recompute full: fits, 27.34 GB on the GPU" in out
    assert "at least 2 such GPUs" in out
    first = answer(f"{LLAMA} --stage 2")["next"][0].partition(":")[0]
    assert answer(f"{LLAMA} --stage 2 {first}")["verdict"] == "fits", "the advice can be typed"
    assert answer(f"{LLAMA} --stage 2 --recompute full")["next"] == []
    assert "What to try" not in run(f"{LLAMA} --stage 2 --recompute full")[1]


def test_the_largest_numbers_together_are_a_plan(answer):
    most = "--sequence 1e18 --micro-batch 1e18 --accumulation 1024 --frozen 1 --nodes 1e17"
    shown = answer(f"--params 1e18 --cluster dgx-a100 --stage 3 {most}")
    assert shown["verdict"] == "fits" and shown["step_s"] > 1e30


def test_advice_for_a_huge_micro_batch_is_as_quick_as_for_one_and_can_be_typed(answer, monkeypatch):
    from zerolab.theory import plan as module

    asked = []
    steps = module.step_tasks
    monkeypatch.setattr(module, "step_tasks", lambda *a: asked.append(a[-1]) or steps(*a))
    advice = answer(f"{LLAMA} --stage 3 --micro-batch 1000000")["next"]
    assert asked == [1], "only the plan that is shown needs its timeline"
    assert all("--accumulation" not in line for line in advice)
    advice = answer(f"{LLAMA} --stage 3 --micro-batch 1000")["next"]
    assert "--accumulation 1000" in advice[0]


def test_the_fastest_is_named_as_one_would_type_it(run, answer):
    code, out, _ = run(f"{LLAMA} --fastest")
    assert code == 0
    said = out.partition("Fastest of those tried: ")[2].partition(";")[0]
    best = answer(f"{LLAMA} --fastest")
    assert best["verdict"] in ("fits", "tight") and best["tokens_per_s"] > 0
    typed = answer(f"{LLAMA} {said}")
    assert typed["step_s"] == best["step_s"] and typed["held_bytes"] == best["held_bytes"]
    assert best["strategy"]["stage"] == best["stage"]


def test_the_fastest_keeps_what_is_given(answer):
    shown = answer(f"{LLAMA} --fastest --recipe adamw-fp32 --sequence 1024 --accumulation 2")
    kept = {"recipe": "adamw-fp32", "sequence": 1024, "accumulation": 2}
    assert kept.items() <= shown["strategy"].items()


def test_typed_forms_are_printed(run, answer):
    code, out, _ = run(f"{LLAMA} --stage 3 --type --offload optimizer=cpu")
    assert code == 0
    assert "fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=CPUOffload" in out
    shown = json.loads(out.partition("DeepSpeed:\n")[2])
    assert shown["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert answer(f"{LLAMA} --stage 3 --type --offload optimizer=cpu")["deepspeed"] == shown
    hybrid = answer(f"{LLAMA} --stage 3 --group 4 --type")
    assert "(2, 4)" in hybrid["pytorch"] and "no hybrid sharding" in hybrid["deepspeed"]
    assert "DeepSpeed:\nDeepSpeed has no" in run(f"{LLAMA} --stage 3 --group 4 --type")[1]


def test_why_prints_the_derivation_behind_each_line(run, answer):
    code, out, _ = run("--params 7.5e9 --ranks 64 --stage 1 --why")
    assert code == 0
    assert "held, total:\nModel states at stage 1, adamw-mixed" in out
    assert "4*Ψ + 12*Ψ/N_d" in out and "-> [Ψ = 7500000000, N_d = 64] 31406250000" in out
    assert "Ring reduce_scatter" in out and "-> [Ψ = 7500000000, N_d = 64] 29531250000" in out
    assert "Why" not in run("--params 7.5e9 --ranks 64 --stage 1")[1]
    shown = answer("--params 7.5e9 --ranks 64 --stage 1 --why")["why"]
    assert [entry["line"] for entry in shown][1] == "held, total"
    assert all(entry["derivation"] in out for entry in shown)


def test_compare_answers_one_question_by_every_convention(run, answer):
    shown = answer("--params 7e9 --ranks 8 --stage 2 --compare")
    assert shown["question"] == {"params": 7 * 10**9, "ranks": 8, "stage": 2}
    sizes = {entry["who"]: entry["num_bytes"] / 1e9 for entry in shown["answers"]}
    assert [who for who in sizes if who in RECIPES] == list(RECIPES)
    assert sizes["adamw-mixed"] == 26.25 and sizes["llm-analysis"] == 28
    assert sizes["accelerate estimate-memory, fp32"] == 112
    assert sizes["accelerate estimate-memory, fp16"] == 56
    assert sizes["EleutherAI cookbook"] == 29
    assert sizes["DeepSpeed estimator, code"] == 29.75
    assert sizes["DeepSpeed estimator, docs"] == 42
    assert all(entry["convention"] for entry in shown["answers"])
    assert all(entry["ours"] == (entry["who"] in RECIPES) for entry in shown["answers"])
    code, out, _ = run("--params 7e9 --ranks 8 --stage 2 --compare")
    assert code == 0
    assert "DeepSpeed estimator, docs             42,000,000,000 B     42.00 GB   1.60x" in out
    assert out.index("ours, by recipe") < out.index("muon") < out.index("public calculators")
    assert out.index("public calculators") < out.index("accelerate")


def test_without_sharding_the_answers_range_from_56_to_140_gb(answer):
    shown = answer("--params 7e9 --ranks 8 --stage 0 --compare")["answers"]
    assert {min(e["num_bytes"] for e in shown), max(e["num_bytes"] for e in shown)} == {
        56 * 10**9, 140 * 10**9}  # fmt: skip


def test_compare_gives_deepspeed_the_largest_layer_of_a_named_model(answer):
    shown = answer("--model llama2-7b --cluster dgx-a100 --stage 3 --compare")
    sizes = {entry["who"]: entry["num_bytes"] for entry in shown["answers"]}
    assert sizes["DeepSpeed estimator, code"] == 18 * 6738415616 // 8 + 4 * 32000 * 4096
    tied = answer("--model llama2-7b --tied --ranks 8 --stage 3 --compare")
    assert tied["question"]["params"] == 6738415616 - 32000 * 4096


def test_every_published_figure_is_printed_beside_ours(run, answer):
    code, out, _ = run("--published")
    assert code == 0
    table = oracles.rows()
    assert f"{len(table)} of {len(table)} rows agree" in out and "DIFFERS" not in out
    assert all(row.source in out and row.published in out for row in table)
    assert all(f"  {what}: {why}" in out for what, why in oracles.EXCLUDED)
    shown = answer("--published")
    assert shown["agrees"] is True and len(shown["rows"]) == len(table)
    assert shown["rows"][0]["ours"] == shown["rows"][0]["published"] == "52.5 41.3 30"
    assert len(shown["left_out"]) == len(oracles.EXCLUDED)


def test_a_published_figure_that_is_not_ours_is_exit_1(run, monkeypatch):
    wrong = oracles.Oracle("nobody", "GB", "7", (8,))
    monkeypatch.setattr(oracles, "rows", lambda: [wrong])
    code, out, _ = run("--published")
    assert code == 1
    assert "DIFFERS" in out and "0 of 1 rows agree" in out
    code, out, _ = run("--published --json")
    assert code == 1 and json.loads(out)["agrees"] is False


SMALL = "--params 7e9 --ranks 8"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{LLAMA} --ranks 8 --stage 3", "--ranks and --cluster exclude one another"),
        (f"{LLAMA} --device h100-80 --stage 3", "--device and --cluster exclude one another"),
        (f"{LLAMA} --params 7e9 --stage 3", "--params and --model exclude one another"),
        (f"{SMALL} --stage 3 --compare --why", "--compare and --why exclude one another"),
        (f"{SMALL} --stage 3 --compare --type", "--compare and --type exclude one another"),
        (f"{SMALL} --compare --fastest", "--compare and --fastest exclude one another"),
        (f"{LLAMA} --fastest --stage 0", "leave out --stage"),
        (f"{LLAMA} --fastest --micro-batch 2", "leave out --micro-batch"),
        (f"{LLAMA} --fastest --offload optimizer=cpu", "leave out --offload"),
        (f"{SMALL} --stage 1 --compare --frozen 5 --group 2", "leave out --frozen, --group"),
        ("--published --params 7e9 --stage 0", "leave out --params, --stage"),
        ("--ranks 8 --stage 1", "--model"),
        ("--params 7e9 --stage 1", "--ranks, --device"),
        (SMALL, "needs --stage, 0 to 3"),
        ("--params 7e9 --ranks 0 --stage 1", "ranks must be a whole number of at least 1, not 0"),
        ("--params 7e9 --ranks -8 --stage 1", "not -8"),
        ("--params 0 --ranks 8 --stage 1", "params must be a whole number of at least 1"),
        ("--params inf --ranks 8 --stage 1", "not inf"),
        ("--params 1e300 --ranks 8 --stage 1", "params must be at most 1e18"),
        (f"{LLAMA} --stage 1 --micro-batch 1e308", "micro_batch must be at most 1e18"),
        (f"{LLAMA} --stage 1 --sequence 1e308", "sequence must be at most 1e18"),
        (f"{LLAMA} --stage 1 --nodes 1e19", "nodes must be at most 1e18"),
        (f"{LLAMA} --stage 1 --accumulation 1025", "accumulation must be at most 1024"),
        (f"{LLAMA} --fastest --accumulation 1e9", "accumulation must be at most 1024"),
        ("--model llama-7b --ranks 8 --stage 1", "the nearest are llama2-7b"),
        ("--model llama9 --stage 2", "the nearest are llama3-8b"),
        ("--model llama9", "the nearest are llama3-8b"),
        ("--model gpt2 --cluster dgx-a10 --stage 1", "the nearest are dgx-a100"),
        ("--model gpt2 --device a100 --stage 1", "the nearest are a100-80"),
        (f"{SMALL} --stage 3 --link nvlink", "the nearest are nvlink"),
        (f"{SMALL} --stage 3 --link 0", "link must be a whole number of at least 1"),
        (f"{SMALL} --stage 3 --link -4e9", "expected one argument"),
        (f"{SMALL} --stage 3 --nodes 0", "nodes must be a whole number of at least 1"),
        (f"{SMALL} --stage 3 --nodes 3", "give a multiple"),
        (f"{LLAMA} --nodes 0 --stage 3", "nodes must be a whole number of at least 1"),
        (f"{SMALL} --stage 1.5", "Stage 1.5 is not known"),
        (f"{SMALL} --stage 4 --compare", "possible are 0, 1, 2, 3"),
        (f"{SMALL} --stage 1 --micro-batch 0", "micro_batch must be"),
        (f"{SMALL} --stage 1 --accumulation 0", "accumulation must be"),
        (f"{SMALL} --stage 1 --sequence -1", "sequence must be"),
        (f"{SMALL} --stage 1 --recompute some", "Recomputation 'some'"),
        (f"{SMALL} --stage 3 --group 3", "a divisor of 8 does"),
        (f"{SMALL} --stage 0 --group 2", "Hybrid sharding needs stage 1"),
        (f"{SMALL} --stage 3 --tensor-parallel 3", "a divisor of 8 does"),
        (f"{SMALL} --stage 3 --frozen 7e9", "At most 6999999999 of 7000000000"),
        (f"{SMALL} --stage 3 --tied", "no tables to tie"),
        (f"{SMALL} --stage 3 --compare --tied", "no tables to tie"),
        (f"{SMALL} --stage 1 --cpu-memory -5", "cpu-memory must be"),
        (f"{SMALL} --stage 1 --nvme 0.5", "nvme must be"),
        (f"{LLAMA} --stage 2 --offload parameters=nvme", "Parameter offload needs stage 3"),
        (f"{LLAMA} --stage 2 --offload optimizer=nvme", "NVMe offload needs stage 3"),
        (f"{LLAMA} --stage 0 --offload optimizer=cpu", "Optimizer offload needs stage 1"),
        (f"{LLAMA} --stage 3 --offload checkpoints=cpu", "recompute='full'"),
        (f"{LLAMA} --stage 3 --offload optimizer=disk", "possible are gpu, cpu, nvme"),
        (f"{LLAMA} --stage 3 --offload optimiser=cpu", "'optimiser=cpu' is not that"),
        (f"{LLAMA} --stage 3 --offload optimizer", "'optimizer' is not that"),
        (f"{LLAMA} --stage 3 --offload optimizer=cpu,optimizer=nvme", "optimizer twice"),
        (f"{SMALL} --stage 3 --offload optimizer=cpu", "give --cpu-memory"),
        (f"{SMALL} --stage 3 --offload parameters=nvme --cpu-memory 1e12", "give --nvme"),
        (f"{SMALL} --stage 3 --offload optimizer=nvme --nvme 1e12", "give --cpu-memory"),
        (f"{LLAMA} --stage 3 --offload optimizer=cpu --cpu-memory 0", "give --cpu-memory"),
        (f"{SMALL} --fastest", "name a device or a cluster"),
        ("--params 7e9 --cluster dgx-a100 --fastest", "give a sequence"),
        ("--model gpt2 --device a100-80 --ranks 8 --nodes 2 --fastest", "over nodes, a link"),
        ("--model llama3-405b --device a100-80 --fastest", "Nothing tried fits"),
    ],
)
def test_what_cannot_be_gets_one_sentence_and_exit_2(run, line, says):
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1 and err.startswith("zerolab plan: "), err
    assert "Traceback" not in err
