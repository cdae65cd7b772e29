"""The timeline of a step adds up to its peak, and says when stage 3 holds more than stage 2."""

import pytest

from zerolab.course.advice import breakdown_of, what_would_help
from zerolab.course.measure import measure
from zerolab.course.peak import stage_3_above_stage_2, step_timeline, why_stage_3_peaks
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.world import RankError

ONE_BLOCK = GPTConfig(layers=1)  # the block is 92 % of the model
THREE_BLOCKS = GPTConfig(layers=3)  # a block is 32 %


def total(row):
    return sum(row[1].values())


def units_of(config):
    return [sum(p.numel() for p in unit.parameters()) for unit in GPT(config).units()]


def timeline_at(world, stage, config, **more):
    return step_timeline(stage, world.size, world, model=config, **more)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_parts_of_a_step_stand_in_order_and_the_highest_is_the_peak(world_of, stage, ranks):
    world = world_of(ranks)
    rows = timeline_at(world, stage, ONE_BLOCK)
    forward, backward = ["forward 0", "forward 1", "forward 2"], ["backward 2", "backward 1"]
    if stage < 2:
        expected = [*forward, *backward, "backward 0", "reduce", "update"]
    else:
        sent = [name for part in (*backward, "backward 0") for name in (part, "reduce")]
        expected = [*forward, *sent, "update"]
    assert [name for name, _ in rows] == expected
    compared = measure(stage, ranks, steps=2, world=world, model=ONE_BLOCK)
    assert max(map(total, rows)) == compared.peak_bytes == sum(compared.peak_by_kind.values())
    highest = max(rows, key=total)[1]
    assert {kind: size for kind, size in highest.items() if size} == compared.peak_by_kind


def test_each_micro_batch_has_its_own_parts(world_of):
    rows = timeline_at(world_of(1), 1, ONE_BLOCK, micro_batches=2)
    assert [name for name, _ in rows].count("forward 1") == 2
    assert [name for name, _ in rows].count("update") == 1


@pytest.mark.parametrize(
    ("config", "ranks", "above"),
    [(ONE_BLOCK, 2, True), (ONE_BLOCK, 4, True), (THREE_BLOCKS, 1, True), (THREE_BLOCKS, 2, False)],
    ids=["92%-on-2", "92%-on-4", "32%-on-1", "32%-on-2"],
)
def test_stage_3_peaks_above_stage_2_where_a_unit_exceeds_what_sharding_saves(
    world_of, config, ranks, above
):
    """Derived to the byte, for every unit in forward and backward; and the peaks follow."""
    units = units_of(config)
    two, three = (dict(timeline_at(world_of(ranks), stage, config)) for stage in (2, 3))
    for place in range(len(units)):
        for part in (f"forward {place}", f"backward {place}"):
            if part != f"forward {len(units) - 1}":  # its peak is the loss, the unit gone again
                differ = sum(three[part].values()) - sum(two[part].values())
                assert differ == stage_3_above_stage_2(place, units, ranks), part
    for part in ("reduce", "update"):
        assert three[part]["gathered"] == 0
        assert sum(three[part].values()) <= sum(two[part].values())
    peaks = [max(sum(row.values()) for row in rows.values()) for rows in (two, three)]
    assert (peaks[1] > peaks[0]) == above
    largest = units.index(max(units))
    assert (stage_3_above_stage_2(largest, units, ranks) > 0) == above
    sentence = why_stage_3_peaks(units, ranks)
    assert f"{abs(stage_3_above_stage_2(largest, units, ranks)):,} bytes" in sentence
    assert ("bytes more than" in sentence) == above


# ---- what would help


def message(capacity, **held):
    made_of = ", ".join(f"{kind.replace('_', ' ')} {size:,}" for kind, size in held.items())
    needed = sum(held.values())
    return (
        f"rank 0: zerolab.practice.toy.DeviceFull: out of memory on the toy device: {needed:,} "
        f"bytes are needed and it has {capacity:,}; at this moment: {made_of}"
    )


def test_a_full_device_s_message_is_read_by_kind():
    held = {"optimizer_states": 1_252_032, "other": 7, "parameters": 208_672}
    assert breakdown_of(message(1_300_000, **held)) == (1_300_000, held)
    assert breakdown_of("rank 1: ValueError: something else") is None
    assert what_would_help("rank 1: ValueError: something else", 0, 4, 1000) == ""


@pytest.mark.parametrize(
    ("stage", "ranks", "capacity", "held", "words"),
    [
        # 16 bytes of 1,000 parameters; at stage 1 on 4 ranks 12,000 / 4 of optimizer states
        (0, 4, 10_000, {"other": 9_000},
         ("Optimizer states are the largest part: stage 1 would hold 3,000 bytes of them instead "
          "of 12,000; all states together fit from stage 1 on (7,000).")),
        (0, 4, 5_600, {"other": 9_000}, "fit from stage 2 on (5,500)."),
        (0, 4, 3_000, {"other": 9_000}, "on 4 ranks all states need 4,000 even at stage 3."),
        (1, 4, 20_000, {"gradients": 9_000, "parameters": 2_000},
         "Gradients are the largest part: stage 2 would hold 500 bytes of them instead of 2,000."),
        (2, 4, 20_000, {"parameters": 9_000}, "Parameters are the largest part: stage 3 would"),
        (3, 4, 20_000, {"optimizer_states": 9_000},
         ("Optimizer states are the largest part: 8 ranks at stage 3 would hold 1,500 bytes of "
          "them instead of 3,000.")),
        (0, 1, 20_000, {"optimizer_states": 12_000},
         "Optimizer states are the largest part: 2 ranks at stage 1 would hold 6,000 bytes"),
        (3, 4, 20_000, {"gathered": 9_000}, "gathered parameters: smaller units, or no prefetch"),
        (1, 4, 20_000, {"temporary": 9_000}, "buffers: smaller units"),
        (2, 4, 20_000, {"other": 9_000, "parameters": 2_000}, "no stage divides them"),
    ],
)  # fmt: skip
def test_the_advice_names_the_largest_part_and_what_it_would_be(
    stage, ranks, capacity, held, words
):
    advice = what_would_help(message(capacity, **held), stage, ranks, 1000)
    assert words in advice
    assert advice.endswith(".")
    assert "\n" not in advice


def test_the_stage_that_is_advised_does_fit_on_the_device():
    """The states alone need 1,669,376 bytes at stage 0; what is advised is then run."""
    small = GPTConfig(context=39)
    with pytest.raises(RankError) as refused:
        measure(0, 4, steps=1, device_memory="1.45 MB", model=small)
    assert "at this moment: " in str(refused.value)
    assert "Optimizer states are the largest part: stage 1 would hold " in str(refused.value)
    done = measure(1, 4, steps=1, device_memory="1.6 MB", model=small)
    assert done.agrees
    assert f"hold {done.held_bytes['measured']['optimizer_states']:,} bytes" in str(refused.value)
