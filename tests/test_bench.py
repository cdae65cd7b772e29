"""The race is fair: every engine learns the same, and sends what it is known to send."""

import pytest

from zerolab.commands.bench import text
from zerolab.practice.bench import PAIRS, race, summary
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.peers import PEERS
from zerolab.theory.memory import held_bytes

SMALL = GPTConfig(context=128, width=32, layers=2, heads=2)


@pytest.fixture(scope="module")
def outcome(world_of):
    return summary(2, world_of(2).run(race, 2, SMALL), SMALL)


def test_all_engines_of_a_precision_have_the_same_loss_after_the_same_steps(outcome):
    for stage, peer, precision in PAIRS:
        if peer in PEERS:
            ours = f"stage {stage} {precision}"
            losses = [outcome["engines"][name]["loss"] for name in (ours, peer)]
            assert losses[0] == pytest.approx(losses[1], abs=2e-4 if precision == "fp32" else 2e-2)


def test_the_contract_s_fields_are_there(outcome):
    assert {"torch"} <= set(outcome["peers"])
    for pair in outcome["pairs"]:
        assert set(pair) >= {"ours", "peer", "ratio", "rounds", "precision"}
        assert pair["rounds"] == 2
        assert pair["ratio"] > 0 and pair["cpu_ratio"] > 0


def test_stages_2_and_3_run_on_gloo_s_own_collectives_too_and_those_send_more(outcome, world_of):
    alone = world_of(2).private_ports  # else others' bytes are among those on the wire
    engines = outcome["engines"]
    for pair in outcome["pairs"]:
        assert (pair["native_ratio"] is not None) == (pair["ours"] in ("stage 2", "stage 3"))
    for name in ("stage 2 bf16", "stage 3 bf16"):
        ours, native = engines[name], engines[f"{name} native"]
        assert ours["loss"] == native["loss"]
        assert ours["sent_bytes_per_parameter"] == native["sent_bytes_per_parameter"]
        if alone and ours["wire_bytes_per_parameter"]:  # gloo's reduce-scatter sends 2 bytes, not 1
            sent = ours["sent_bytes_per_parameter"]  # packets' headers and acknowledgements add
            assert sent <= ours["wire_bytes_per_parameter"] < sent + 1
            assert sent + 1 <= native["wire_bytes_per_parameter"] < sent + 2


def test_the_parts_of_the_cpu_time_are_its_sum_and_none_but_the_runner_alone_is_without_them(
    outcome,
):
    for name, engine in outcome["engines"].items():
        parts = engine["cpu_parts_s"]
        assert sum(parts.values()) == pytest.approx(engine["cpu_s"], abs=1e-3)
        assert (parts["optimizer"] > 0) == (not name.startswith("alone"))


def test_what_a_pair_adds_to_forward_and_backward_is_the_other_parts_of_both(outcome):
    compared = 0
    for pair in outcome["pairs"]:
        name = f"{pair['ours']} {pair['precision']}"
        whole = [outcome["engines"][engine] for engine in (name, pair["peer"])]
        added = [e["cpu_s"] - e["cpu_parts_s"]["forward_backward"] for e in whole]
        if pair["added_cpu_ratio"] is not None:
            compared += 1
            rounded = 1e-3 + 2e-4 * abs(pair["added_cpu_ratio"]) + 1e-3 * abs(added[1])
            assert pair["added_cpu_ratio"] * added[1] == pytest.approx(added[0], abs=rounded)
    assert compared


def test_the_text_has_a_line_for_each_pair_and_each_engine(outcome):
    shown = text(outcome)
    for pair in outcome["pairs"]:
        assert f"{pair['ours']:9}{pair['peer']:20}{pair['precision']}" in shown
    for name in outcome["engines"]:
        assert shown.count(f"\n{name} ") >= 2


@pytest.mark.parametrize(
    ("engine", "bytes_per_parameter"),
    [
        ("stage 0 fp32", 4),  # 4 bytes, twice, half of them on two ranks
        ("ddp", 4),
        ("stage 1 fp32", 4),
        ("stage 2 bf16", 2),
        ("stage 3 bf16", 3),
        ("fsdp2", 3),
        ("fsdp2-no-reshard", 2),
        ("fsdp2-fp32", 6),
        *([(f"deepspeed-{stage}", 3) for stage in (1, 2, 3)] if "deepspeed-3" in PEERS else []),
    ],
)
def test_engines_send_what_they_are_known_to_send(outcome, engine, bytes_per_parameter):
    sent = outcome["engines"][engine]["sent_bytes_per_parameter"]
    assert sent == pytest.approx(bytes_per_parameter, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "precision", "recipe"),
    [
        (0, "fp32", "adamw-fp32"),
        (1, "fp32", "adamw-fp32"),
        (2, "bf16", "adamw-mixed"),
        (3, "bf16", "adamw-mixed"),
        (3, "fp32", "adamw-fp32"),
    ],
)
def test_a_stage_in_the_race_holds_what_is_derived_for_it(outcome, stage, precision, recipe):
    units = [num_parameters(unit) for unit in GPT(SMALL).units()] if stage >= 2 else None
    derived = held_bytes(stage, 2, outcome["params"], recipe, units)["total"]
    held = outcome["engines"][f"stage {stage} {precision}"]["held_bytes_per_parameter"]
    assert held == round(derived / outcome["params"], 3)


def test_every_engine_holds_its_states_and_the_runner_alone_no_optimizer_s(outcome):
    held = {name: e["held_bytes_per_parameter"] for name, e in outcome["engines"].items()}
    assert held["ddp"] == pytest.approx(16, rel=0.02)
    assert held["fsdp2"] == pytest.approx(8, rel=0.02)  # fp32 shards of all four
    assert held["alone fp32"] == 8 and held["alone bf16"] == 4
    shown = text(outcome)
    for name, each in held.items():
        assert f"\n{name:32}{each:8.2f}" in shown


def test_stage_1_is_free_and_zero_redundancy_optimizer_is_not(outcome):
    sent = {name: e["sent_bytes_per_parameter"] for name, e in outcome["engines"].items()}
    assert sent["stage 1 fp32"] == pytest.approx(sent["ddp"], rel=0.01)
    assert sent["zero-redundancy"] == pytest.approx(1.5 * sent["ddp"], rel=0.05)
