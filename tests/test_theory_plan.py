"""Plans: exact for bare numbers, honest about the rest, and one sentence where impossible."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.course.compare import compare
from zerolab.course.search import fastest, what_next
from zerolab.course.typed import deepspeed_json, pytorch_lines
from zerolab.theory import COLLECTIVES, KINDS, held_bytes, sent_bytes
from zerolab.theory.catalog import LINKS, MODELS, NODES, Cluster, cluster, model
from zerolab.theory.plan import Strategy, plan


@given(st.integers(1, 10**10), st.integers(1, 500), st.sampled_from(range(4)), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_a_bare_plan_is_the_exact_formulas(params, ranks, stage, times):
    p = plan(params=params, ranks=ranks, stage=stage, micro_batches=times)
    shown = p.as_dict()
    assert shown["held_bytes"] == held_bytes(stage, ranks, params)
    assert shown["sent_bytes"] == sent_bytes(stage, ranks, params, micro_batches=times)
    assert set(shown["held_bytes"]) == {*KINDS, "total"}
    assert set(shown["sent_bytes"]) == {*COLLECTIVES, "total"}
    assert all(
        type(n) is int for side in ("held_bytes", "sent_bytes") for n in shown[side].values()
    )
    json.dumps(shown)


def test_text_shows_bytes_gigabytes_recipe_and_what_is_left_out():
    text = plan(params=7.5e9, ranks=64, stage=1).as_text()
    for part in ("31,406,250,000 B", "31.406 GB", "adamw-mixed", "leaves out activations"):
        assert part in text
    assert plan(7.5e9, 64, 1).as_text() == text, "the same question in positions"


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_computed_and_equal_the_published(name):
    m = MODELS[name]
    if "e" in m.published:
        assert round(m.params, -9) == float(m.published)
    else:
        assert m.params == int(m.published)
    assert sum(m.units) == m.params and m.active_params <= m.params


def test_padding_gpt2s_vocabulary_gives_llm_cs_count():
    assert MODELS["gpt2"].params + (50304 - 50257) * 768 == 124475904


def test_mixtral_computes_with_two_of_eight_experts():
    assert round(MODELS["mixtral-8x7b"].active_params / 1e9, 1) == 12.9


def test_every_link_and_node_has_a_source():
    assert all(source for _, source in LINKS.values())
    assert all(node.source and node.gpu for node in NODES.values())


def test_exercise_4_fits_only_with_optimizer_states_on_nvme():
    where = {"gpu": "does not fit", "cpu": "does not fit", "nvme": "tight"}
    for tier, verdict in where.items():
        s = Strategy(stage=3, optimizer_on=tier, recompute="full")
        assert plan("gpt3-175b", "dgx-a100", s).verdict == verdict
    p = plan("gpt3-175b", "dgx-a100", Strategy(3, optimizer_on="nvme", recompute="full"))
    assert p.tiers == {"parameters": "gpu", "gradients": "cpu", "optimizer_states": "nvme"}
    assert p.timeline.bound == "disk"
    assert p.timeline.busy_s("disk") == pytest.approx(168, rel=0.01)


def test_zero_offload_on_one_gpu_keeps_two_bytes_a_parameter():
    one = Cluster("workstation", 1, 1, "v100-32", 512 * 10**9, host_bytes_per_s=12e9)
    p = plan(model(10**10), one, Strategy(2, optimizer_on="cpu", sequence=1024))
    assert p.fits[0].states_bytes == 2 * 10**10
    assert p.tiers["gradients"] == "cpu"
    assert p.timeline.busy_s("cpu optimizer") == pytest.approx(2.57)


def test_stage_1_offload_leaves_whole_gradients_on_the_gpu():
    p = plan("gpt2-xl", "dgx2", Strategy(1, optimizer_on="cpu"))
    assert p.tiers["gradients"] == "gpu"


def test_residual_states_are_shown_apart():
    p = plan("llama2-7b", "dgx-a100", Strategy(stage=3))
    assert p.held["total"] == held_bytes(3, 8, 6738415616)["total"]
    gpu = p.fits[0]
    assert gpu.states_bytes == p.held["total"]
    assert gpu.low_bytes == gpu.states_bytes + sum(r.low for r in p.residuals)
    names = {r.name for r in p.residuals}
    assert {"activations", "gathered units", "framework context", "fragmentation"} <= names
    assert p.verdict == "does not fit" and "recompute full: fits" in what_next(p)[0]


def test_checkpoints_on_the_cpu_leave_the_gpu():
    stay, leave = (
        plan("llama2-7b", "dgx-a100", Strategy(3, recompute="full", checkpoints_on=tier))
        for tier in ("gpu", "cpu")
    )
    checkpoints = 2 * 4096 * 4096 * 32
    assert stay.fits[0].low_bytes - leave.fits[0].low_bytes == checkpoints
    assert leave.fits[1].tier == "cpu" and leave.fits[1].low_bytes == 8 * checkpoints
    assert leave.timeline.busy_s("host link") == pytest.approx(2 * checkpoints / 12e9)


def test_hybrid_sharding_trades_memory_for_traffic_between_nodes():
    two = cluster("dgx-a100", nodes=2)
    full, hybrid = (plan("llama2-7b", two, Strategy(3, group=g)) for g in (0, 8))
    assert hybrid.held["total"] == 2 * full.held["total"]
    shard = 6738415616 // 8
    assert hybrid.sent["all_reduce"] == 2 * shard, "2(N-1)/N of a shard of 2-byte gradients, N=2"
    assert hybrid.timeline.busy_s("network") < full.timeline.busy_s("network")


def test_frozen_parameters_have_no_gradient_unless_they_share_their_units():
    apart, mixed = (
        plan(7.02e9, 8, Strategy(3, "fsdp2-mixed", frozen=7 * 10**9, frozen_apart=a))
        for a in (True, False)
    )
    assert apart.held["gradients"] == 4 * 20 * 10**6 // 8
    assert mixed.held["gradients"] == 4 * 7020 * 10**6 // 8
    assert apart.held["parameters"] == mixed.held["parameters"] == 4 * 7020 * 10**6 // 8
    assert apart.held["optimizer_states"] == mixed.held["optimizer_states"]
    assert apart.sent["all_gather"] == mixed.sent["all_gather"] > 0
    assert apart.sent["reduce_scatter"] < mixed.sent["reduce_scatter"]
    assert apart.held["total"] == sum(apart.held[kind] for kind in KINDS)


def test_tensor_parallel_ranks_split_the_model_first():
    p = plan("llama2-7b", "dgx-a100", Strategy(1, tensor_parallel=2))
    assert (p.ranks, p.params) == (4, 6738415616 // 2)


def test_overlap_is_never_slower():
    s = Strategy(stage=3, recompute="full")
    serial = plan("llama2-7b", "dgx-a100", Strategy(3, recompute="full", overlap=False))
    both = plan("llama2-7b", "dgx-a100", s)
    assert both.timeline.total_s <= serial.timeline.total_s <= 2 * both.timeline.total_s


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "llama2-70b", "gpt3-175b"])
def test_the_fastest_that_fits_is_found_within_a_second(name):
    start = time.perf_counter()
    p = fastest(name, "dgx-a100")
    assert time.perf_counter() - start < 1.0
    assert p.verdict in ("fits", "tight") and p.tokens_per_s > 0
    slow = plan(name, "dgx-a100", Strategy(3, optimizer_on="nvme", parameters_on="nvme",
                                           recompute="full"))  # fmt: skip
    assert p.tokens_per_s > slow.tokens_per_s


def test_what_next_keeps_the_batch_and_names_the_floor():
    p = plan("gpt3-175b", "dgx-a100", Strategy(stage=2, micro_batch=4))
    texts = what_next(p)
    assert any("optimizer_on nvme" in text for text in texts)
    assert any("micro_batch 1, accumulation 4" in text for text in texts)
    assert "at least 35 such GPUs" in texts[-1], "2794 GB over 80 GB each"
    assert what_next(plan("gpt2", "dgx-a100", Strategy(stage=1))) == ()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan(params=7e9, ranks=0, stage=1), "whole number of at least 1, not 0"),
        (lambda: plan(params=-1, ranks=1, stage=1), "params must be a whole number of at least 1"),
        (lambda: plan(params=7e9), "needs a model"),
        (lambda: plan("llama2-8b", 8), "nearest are llama"),
        (lambda: plan("gpt2", "dgx3"), "nearest are dgx2"),
        (lambda: Strategy(stage=4), "possible are 0, 1, 2, 3"),
        (lambda: Strategy(2, optimizer_on="nvme"), "NVMe offload needs stage 3"),
        (lambda: Strategy(2, parameters_on="nvme"), "Parameter offload needs stage 3"),
        (lambda: Strategy(2, parameters_on="cpu"), "Parameter offload needs stage 3"),
        (lambda: Strategy(0, optimizer_on="cpu"), "needs stage 1"),
        (lambda: Strategy(1, micro_batch=0), "micro_batch must be a whole number of at least 1"),
        (lambda: Strategy(1, optimizer_on="disk"), "possible are gpu, cpu, nvme"),
        (lambda: Strategy(3, checkpoints_on="cpu"), "with recompute='full'"),
        (lambda: Strategy(0, group=4), "Hybrid sharding needs stage 1"),
        (lambda: plan(7e9, 8, Strategy(2, optimizer_on="cpu")), "give cpu_bytes"),
        (lambda: plan(7e9, Cluster("c", 8, cpu_bytes=1), Strategy(3, optimizer_on="nvme")),
         "give nvme_bytes"),
        (lambda: plan(7e9, 8, Strategy(3, group=3)), "a divisor of 8"),
        (lambda: plan(7e9, 8, Strategy(3, tensor_parallel=3)), "a divisor of 8"),
        (lambda: plan(100, 8, Strategy(3, frozen=100)), "At most 99 of 100"),
        (lambda: fastest("llama3-405b", Cluster("one", 1, 1, "a100-80")), "Nothing tried fits"),
    ],
)  # fmt: skip
def test_bad_input_is_answered_in_one_sentence(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_typed_forms():
    p = plan("llama2-7b", cluster("dgx-a100", 2), Strategy(3, group=8, optimizer_on="cpu",
             parameters_on="cpu", recompute="full", accumulation=4, reduce_bytes=4))  # fmt: skip
    lines = pytorch_lines(p)
    assert 'init_device_mesh("cuda", (2, 8)' in lines and "CPUOffloadPolicy()" in lines
    assert "reduce_dtype=torch.float32" in lines and "reshard_after_forward" not in lines
    config = json.loads(deepspeed_json(p))
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert config["gradient_accumulation_steps"] == 4
    two = pytorch_lines(plan("llama2-7b", "dgx-a100", 2))
    assert "reshard_after_forward=False" in two
    assert "ZeroRedundancyOptimizer" in pytorch_lines(plan("gpt2", "dgx-a100", 1))
    assert pytorch_lines(plan("gpt2", "dgx-a100", 0)).startswith("model = DistributedData")
    compile(two, "typed", "exec")
    nvme = plan("gpt2", "dgx-a100", Strategy(3, optimizer_on="nvme"))
    assert "no NVMe offload" in pytorch_lines(nvme) and "NVME_FOLDER" in deepspeed_json(nvme)


def test_compare_explains_each_difference():
    answers = {a.who: a for a in compare(2851e6, 8, 2)}
    assert answers["adamw-mixed"].num_bytes == held_bytes(2, 8, 2851e6)["total"]
    assert answers["DeepSpeed estimator, code"].num_bytes == 4.25 * 2851e6
    assert answers["DeepSpeed estimator, docs"].num_bytes == 6 * 2851e6
    assert answers["llm-analysis"].num_bytes == 4 * 2851e6
    assert all(a.convention for a in answers.values())


def test_two_public_answers_do_not_conserve():
    """Over the ranks, what is sharded must add up to what is held unsharded: 20 and not 18."""
    params, n = 8 * 10**9, 8
    by_stage = {stage: {a.who: a.num_bytes for a in compare(params, n, stage)} for stage in (2, 3)}
    code = "DeepSpeed estimator, code"
    sharded_2 = (by_stage[2][code] - 2 * params) * n + 2 * params
    assert sharded_2 == 20 * params and by_stage[3][code] * n == 18 * params
    ours_2 = (by_stage[2]["adamw-mixed"] - 2 * params) * n + 2 * params
    assert ours_2 == by_stage[3]["adamw-mixed"] * n == 16 * params
