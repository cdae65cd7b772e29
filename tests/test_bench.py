"""The race is fair: every engine learns the same, and sends what it is known to send."""

import pytest

from zerolab.practice.bench import PAIRS, race, summary
from zerolab.practice.gpt import GPTConfig
from zerolab.practice.peers import PEERS

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
        assert pair["ratio"] > 0


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
    ],
)
def test_engines_send_what_they_are_known_to_send(outcome, engine, bytes_per_parameter):
    sent = outcome["engines"][engine]["sent_bytes_per_parameter"]
    assert sent == pytest.approx(bytes_per_parameter, rel=0.02)


def test_stage_1_is_free_and_zero_redundancy_optimizer_is_not(outcome):
    sent = {name: e["sent_bytes_per_parameter"] for name, e in outcome["engines"].items()}
    assert sent["stage 1 fp32"] == pytest.approx(sent["ddp"], rel=0.01)
    assert sent["zero-redundancy"] == pytest.approx(1.5 * sent["ddp"], rel=0.05)
