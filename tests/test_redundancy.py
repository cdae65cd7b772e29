"""The copies that are counted on real ranks are those that the theory leaves unsharded."""

import pytest

from zerolab.course.redundancy import redundant_bytes, states_after_step
from zerolab.practice import data
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT
from zerolab.practice.measure import STAGES
from zerolab.theory.memory import RECIPES, sharded_kinds


def after_a_step(stage):
    comm, model = Comm(), GPT()
    engine = STAGES[stage](model, comm)
    engine.backward(model.loss(*data.batch(0, comm.rank, comm.world_size)))
    engine.step()
    return states_after_step(engine), sum(unit.padded for unit in engine.units)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_exactly_what_a_stage_does_not_shard_is_there_n_times(world_of, stage, ranks):
    results = world_of(ranks).run(after_a_step, stage)
    whole = {"parameters", "optimizer_states"} - set(sharded_kinds(stage))
    per_parameter = sum(RECIPES["adamw-mixed"].size(kind) for kind in whole)
    padded = results[0][1]
    assert redundant_bytes([pieces for pieces, _ in results]) == (
        (ranks - 1) * per_parameter * padded
    )
