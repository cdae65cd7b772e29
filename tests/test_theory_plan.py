"""Plans: exact for bare numbers, honest about the rest, and one sentence where impossible."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.commands.plan_why import why
from zerolab.course.compare import compare
from zerolab.course.search import fastest, what_next
from zerolab.course.typed import deepspeed_config, pytorch_lines
from zerolab.theory import COLLECTIVES, KINDS, held_bytes, sent_bytes
from zerolab.theory.catalog import GPUS, LINKS, MODELS, NODES, Cluster, cluster, model
from zerolab.theory.plan import Strategy, plan


@given(st.integers(1, 10**10), st.integers(1, 500), st.sampled_from(range(4)), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_a_bare_plan_is_the_exact_formulas(params, ranks, stage, times):
    p = plan(params, ranks, Strategy(stage, accumulation=times))
    assert p.held == held_bytes(stage, ranks, params)
    assert p.sent == sent_bytes(stage, ranks, params, micro_batches=times)
    assert set(p.held) == {*KINDS, "total"}
    assert set(p.sent) == {*COLLECTIVES, "total"}
    assert all(type(n) is int for side in (p.held, p.sent) for n in side.values())


def test_a_stage_alone_is_a_strategy():
    assert plan(7.5e9, 64, 1) == plan(7_500_000_000, 64, Strategy(stage=1))
    assert plan(7.5e9, 64, 1).held["total"] == 31_406_250_000


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


def test_every_fact_has_a_source():
    facts = (*MODELS.values(), *LINKS.values(), *GPUS.values(), *NODES.values())
    assert all(fact.source for fact in facts)
    assert all({gpu.link, gpu.host} <= set(LINKS) for gpu in GPUS.values())
    assert all(node.gpu in GPUS for node in NODES.values())


def test_rates_are_one_way_whatever_the_vendor_prints():
    for link in LINKS.values():
        assert link.printed == link.bytes_per_s * (1 if link.one_way else 2)


def test_a_tied_pair_counts_once():
    table = 32000 * 4096
    untied, tied = (plan("llama2-7b", 8, Strategy(3, tied=tie)) for tie in (None, True))
    assert untied.params - tied.params == table
    assert untied.held["total"] - tied.held["total"] == 16 * table // 8
    assert tied.model.name == "llama2-7b, tied" and untied.model.name == "llama2-7b"
    assert model("gpt2", tied=False).params - model("gpt2").params == 50257 * 768
    assert model("gpt2", tied=True) is MODELS["gpt2"], "as released"


def test_a_given_link_replaces_the_gpu_s_and_the_network():
    fast, slow = (replace(cluster("dgx-a100", 2), rank_bytes_per_s=rate) for rate in (0, 1e9))
    assert (fast.link_bytes_per_s(8), fast.link_bytes_per_s(16)) == (300e9, 25e9)
    assert (slow.link_bytes_per_s(8), slow.link_bytes_per_s(16)) == (1e9, 1e9)
    p = plan(7e9, replace(cluster(8), rank_bytes_per_s=400e9), 3)
    assert p.sent_s == pytest.approx(0.091875), "exercise 3 of the lecture: 91.875 ms"
    assert plan(7e9, 8, 3).sent_s is None


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
    assert p.cluster.nvme_bytes == 30 * 10**12
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
    assert leave.timeline.busy_s("host link") == pytest.approx(2 * checkpoints / 15.5e9)


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
def test_the_fastest_that_fits_is_found_with_a_look_at_each_way(name, monkeypatch):
    looks = []
    monkeypatch.setattr("zerolab.course.search.plan", lambda *a: looks.append(a) or plan(*a))
    p = fastest(name, "dgx-a100")
    assert len(looks) == len(set(looks)) == 168, "a millisecond each: an explorer answers at once"
    assert p.verdict in ("fits", "tight") and p.tokens_per_s > 0
    slow = plan(name, "dgx-a100", Strategy(3, optimizer_on="nvme", parameters_on="nvme",
                                           recompute="full"))  # fmt: skip
    assert p.tokens_per_s > slow.tokens_per_s


def test_what_next_keeps_the_batch_and_names_the_floor():
    p = plan("gpt3-175b", "dgx-a100", Strategy(stage=2, micro_batch=4))
    texts = what_next(p)
    assert any("--offload optimizer=nvme" in text for text in texts)
    assert any("--micro-batch 1 --accumulation 4" in text for text in texts)
    assert "at least 35 such GPUs" in texts[-1], "2794 GB over 80 GB each"
    assert what_next(plan("gpt2", "dgx-a100", Strategy(stage=1))) == ()
    assert what_next(plan("gpt2", 8, 1)) == (), "no capacity is known"


def test_gradients_are_fused_where_they_are_reduced_and_no_unit_is():
    names = [{r.name for r in plan("gpt2", "dgx-a100", k).residuals} for k in range(4)]
    assert "fused buffer of all gradients" in names[0]
    assert all("fused buffer, constant size" in found for found in names[1:3])
    assert not any("fused" in name for name in names[3])
    alone = plan("gpt2", Cluster("one", 1, 1, "a100-80"), 0)
    assert not any("fused" in r.name for r in alone.residuals), "one rank reduces nothing"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan(7e9, 0, 1), "ranks must be a whole number of at least 1, not 0"),
        (lambda: plan(-1, 1, 1), "params must be a whole number of at least 1"),
        (lambda: plan(7e9, 8, Strategy(1, tied=True)), "no tables to tie"),
        (lambda: fastest("gpt2", 8), "name a device or a cluster"),
        (lambda: fastest(7e9, "dgx-a100"), "give a sequence"),
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
    s = Strategy(3, optimizer_on="cpu", parameters_on="cpu", recompute="full", accumulation=4,
                 reduce_bytes=4, checkpoints_on="cpu")  # fmt: skip
    p = plan("llama2-7b", cluster("dgx-a100", 2), s)
    lines = pytorch_lines(p)
    assert 'init_device_mesh("cuda", (16,))' in lines and "CPUOffloadPolicy()" in lines
    assert "reduce_dtype=torch.float32" in lines and "reshard_after_forward" not in lines
    config = deepspeed_config(p)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert config["gradient_accumulation_steps"] == 4
    assert config["activation_checkpointing"] == {
        "partition_activations": True, "cpu_checkpointing": True}  # fmt: skip
    hybrid = plan("llama2-7b", cluster("dgx-a100", 2), Strategy(3, group=8))
    assert (
        'init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))'
        in pytorch_lines(hybrid)
    )
    with pytest.raises(ValueError, match="no hybrid sharding"):
        deepspeed_config(hybrid)
    two = pytorch_lines(plan("llama2-7b", "dgx-a100", 2))
    assert "reshard_after_forward=False" in two
    assert "ZeroRedundancyOptimizer" in pytorch_lines(plan("gpt2", "dgx-a100", 1))
    assert pytorch_lines(plan("gpt2", "dgx-a100", 0)).startswith("model = DistributedData")
    compile(two, "typed", "exec")
    nvme = plan("gpt2", "dgx-a100", Strategy(3, optimizer_on="nvme"))
    assert "no NVMe offload" in pytorch_lines(nvme)
    assert deepspeed_config(nvme)["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme", "pin_memory": True, "nvme_path": "NVME_FOLDER"}  # fmt: skip


@pytest.mark.parametrize(("stage", "said"), [(1, True), (2, True), (3, False)])
def test_deepspeed_is_told_to_send_what_the_plan_says(stage, said):
    zero = deepspeed_config(plan(7e9, 8, Strategy(stage)))["zero_optimization"]
    assert zero.get("use_multi_rank_bucket_allreduce") is (False if said else None)


def test_typed_forms_follow_the_recipe():
    def typed(recipe):
        p = plan("gpt2", "dgx-a100", Strategy(3, recipe))
        return pytorch_lines(p), deepspeed_config(p)["bf16"]

    lines, bf16 = typed("adamw-fp32")
    assert "param_dtype=torch.float32" in lines and bf16 == {"enabled": False}
    lines, bf16 = typed("deepspeed-bf16-states")
    assert bf16["bf16_master_weights_and_grads"] and bf16["bf16_optimizer_states"]
    assert "no separate master weights" in typed("adamw-mixed")[0]
    assert "no separate master weights" not in typed("fsdp2-mixed")[0]


def test_each_line_of_a_plan_has_its_derivation_down_to_its_number():
    s = Strategy(3, recompute="full", accumulation=2)
    p = plan("llama2-7b", "dgx-a100", s)
    found = dict(why(p))
    assert found["held, total"].result == p.held["total"]
    assert found["sent, total"].result == p.sent["total"]
    assert found["besides, activations"].result == p.residuals[0].low
    assert {"sent, with accumulation", "step", "sent, against stage 0"} <= set(found)
    for stage in range(4):
        bare = dict(why(plan(7_000_000_001, 6, stage)))
        assert bare["held, total"].result == plan(7_000_000_001, 6, stage).held["total"]
    assert "sent, between groups" in dict(why(plan(7e9, 8, Strategy(3, group=4))))


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
