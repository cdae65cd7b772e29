"""Stages 0 and 1: derived bytes are counted bytes, and the weights have the bits of one process."""

import pytest

from zerolab.course.measure import measure
from zerolab.practice.measure import STAGES
from zerolab.practice.precision import PRECISIONS
from zerolab.theory.memory import RECIPES

RANKS = [1, 2, 3, 4]


@pytest.mark.parametrize("recipe", PRECISIONS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_derived_is_counted_and_bits_are_those_of_one_process(world_of, stage, ranks, recipe):
    compared = measure(stage, ranks, recipe, world=world_of(ranks))
    assert compared.params % ranks or ranks == 1  # the size does not divide
    assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
    assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
    assert compared.equal
    assert compared.same_weights_as_one_process
    assert compared.bitwise
    assert compared.control_bytes == 0
    assert compared.losses[-1] < compared.losses[0]


@pytest.mark.parametrize("ranks", [5, 7, 8])
def test_more_ranks_than_cores_change_nothing(world_of, ranks):
    assert measure(1, ranks, steps=3, world=world_of(ranks)).agrees


def test_one_rank_sends_nothing(world_of):
    compared = measure(1, 1, steps=2, world=world_of(1))
    assert set(compared.sent_bytes["measured"].values()) == {0}


def test_stages_have_the_same_losses(world_of):
    losses = {stage: measure(stage, 4, world=world_of(4)).losses for stage in STAGES}
    assert losses[0] == losses[1]


def test_wire_and_sent_bytes_agree(world_of):
    compared = measure(1, 4, world=world_of(4))
    if compared.wire_bytes is None:
        pytest.skip(str(compared.wire_reason))
    # 12.5 MB in ten steps
    assert abs(compared.wire_bytes / compared.sent_bytes["measured"]["total"] - 1) < 0.02


def test_every_recipe_that_ranks_can_run_is_derived_with_the_same_bytes():
    for name, precision in PRECISIONS.items():
        recipe = RECIPES[name]
        assert recipe.parameter == recipe.gradient == precision.working.itemsize
        assert ("master weight" in dict(recipe.optimizer)) == precision.master_weights


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": 9, "ranks": 2}, "choose one of"),
        ({"stage": 1, "ranks": 2, "recipe": "adam-9000"}, "adamw-mixed"),
        ({"stage": 1, "ranks": 2, "steps": 0}, "at least 1"),
        ({"stage": 1, "ranks": 0}, ""),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        measure(**arguments)
