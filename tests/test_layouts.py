"""The dictionary of layouts: derived and counted, on real ranks, and refusals in a sentence."""

import dataclasses

import pytest
import sympy as sp
import torch

from zerolab.course.layouts import layout_row, layout_table, unit_numels
from zerolab.practice.layouts import FSDP1, FSDP2, SMALL, Calls, watch_layout
from zerolab.practice.layouts import LAYOUTS as WATCHED
from zerolab.theory.layouts import LAYOUTS, layout
from zerolab.theory.memory import held_bytes
from zerolab.theory.notation import G, N_d, Psi
from zerolab.theory.traffic import sent_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_holds_keeps_and_sends_what_is_derived_on_four_ranks(world_of, name):
    row = layout_row(name, world_of(4))
    assert row.derived == row.counted
    assert row.agrees


@pytest.mark.parametrize("name", [*(n for n in FSDP1 if n != "HYBRID_SHARD"), *FSDP2, "DDP"])
def test_and_on_three(world_of, name):
    assert layout_row(name, world_of(3)).agrees


def test_between_steps_there_are_no_gradients(world_of):
    for name, parameters, moments in (("SHARD_GRAD_OP", 4, 8), ("our stage 2", 2, 12)):
        seen = world_of(4).run(watch_layout, name)[0]
        held = seen.backward
        assert seen.between == held["parameters"] + held["optimizer_states"]
        assert held["optimizer_states"] * parameters * (4 if name == "our stage 2" else 1) == (
            held["parameters"] * moments
        )


def test_shard_grad_op_is_at_rest_stage_3_and_in_forward_two_bytes_more(world_of):
    world = world_of(4)
    kept, full = (world.run(watch_layout, n)[0] for n in ("SHARD_GRAD_OP", "FULL_SHARD"))
    padded = full.backward["parameters"]  # 4 bytes over 4 ranks: one for each element
    assert (kept.between, kept.backward) == (full.between, full.backward)
    assert kept.forward - full.forward == 2 * padded
    assert full.forward == full.backward["total"]


def test_a_gather_for_each_unit_and_pass_backwards_in_reverse(world_of):
    for name in ("FULL_SHARD", "reshard_after_forward=True"):
        gathers = world_of(4).run(watch_layout, name)[0].gathers
        forward, backward = gathers[: len(gathers) // 2], gathers[len(gathers) // 2 :]
        assert forward == backward[::-1] and len(forward) == len(unit_numels())
        assert all(got >= 2 * numel for got, numel in zip(forward, unit_numels(), strict=True))


def test_hybrid_sharding_gathers_in_pairs_and_all_reduces_shards(world_of):
    seen = world_of(4).run(watch_layout, "HYBRID_SHARD")[0]
    assert seen.sent["all_gather"] == 2 * seen.sent["reduce_scatter"] > 0
    assert seen.sent["all_reduce"] == seen.backward["parameters"] // 2  # 16 bits on the wire


def test_no_shard_sends_what_ddp_sends_and_is_said_to_be_deprecated(world_of):
    ddp, none = (world_of(4).run(watch_layout, n, torch.float32)[0] for n in ("DDP", "NO_SHARD"))
    assert (ddp.sent["total"], ddp.backward) == (none.sent["total"], none.backward)
    assert any("NO_SHARD" in words and "deprecated" in words for words in none.said)
    assert not any("deprecated" in words for words in ddp.said)


def test_the_formulas_are_those_of_the_stages_where_a_stage_is_meant():
    params, n = 840_000, 4
    for name, stage, recipe in (
        ("our stage 1", 1, "adamw-mixed"),
        ("our stage 2", 2, "adamw-mixed"),
        ("our stage 3", 3, "adamw-mixed"),
        ("FULL_SHARD", 3, "fsdp2-mixed"),
        ("DDP", 0, "adamw-fp32"),
    ):
        sizes = layout(name).bytes_of(params, n)
        assert sizes["states"] == held_bytes(stage, n, params, recipe)["total"]
        assert sizes["sent"] == sent_bytes(stage, n, params, recipe)["total"]
        assert sizes["whole"] == 0


def test_hybrid_in_one_group_is_full_sharding_and_in_groups_of_one_data_parallelism():
    hybrid = layout("HYBRID_SHARD")
    one_group = sp.simplify(hybrid.sent().subs(G, N_d) - layout("FULL_SHARD").sent())
    alone = sp.simplify(hybrid.sent().subs(G, 1) - layout("NO_SHARD").sent())
    assert (one_group, alone) == (0, 0)
    assert hybrid.states().subs(G, N_d) == layout("FULL_SHARD").states() == 16 * Psi / N_d


def test_what_differs_is_shown_and_does_not_agree(world_of):
    table = layout_table(world_of(4), ("FULL_SHARD",))
    row = table.rows[0]
    assert table.agrees and "≠" not in repr(table) + table._repr_markdown_()
    other = dataclasses.replace(row, counted=row.counted | {"sent": 1})
    wrong = dataclasses.replace(table, rows=(other,))
    assert not wrong.agrees and f"{row.derived['sent']:,} ≠ 1" in repr(wrong)
    assert "≠ 1" in wrong._repr_markdown_()


def test_what_is_no_layout_is_refused(world_of):
    with pytest.raises(ValueError, match="FULL_SHARD"):
        layout("FULL_SHARDS")
    with pytest.raises(ValueError, match="not known: choose one of DDP"):
        watch_layout("ZeRO-3")
    assert set(LAYOUTS) <= set(WATCHED)


def gather_five():
    import torch.distributed as dist

    with Calls() as meter:
        parts = [torch.empty(5) for _ in range(2)]
        dist.all_gather(parts, torch.ones(5))
        dist.all_gather_into_tensor(torch.empty(10), torch.ones(5))
    return meter.calls


def test_both_forms_of_an_all_gather_are_noted_with_the_whole_buffer(world_of):
    calls = world_of(2).run(gather_five)[0]
    assert [size for _, size in calls] == [40, 40]
    assert SMALL.width == 32
