"""Stages 0 to 3: derived bytes are counted bytes, and the weights have the bits of one process."""

import pytest

from zerolab.course.measure import measure
from zerolab.practice.gpt import GPTConfig
from zerolab.practice.measure import STAGES, Job
from zerolab.practice.precision import PRECISIONS
from zerolab.theory.memory import RECIPES

RANKS = [1, 2, 3, 4]
FAST = {"overlap": True, "prefetch": True}


def expect_agreement(compared):
    """Everything that must be equal is, and training trains."""
    assert compared.held_bytes["predicted"] == compared.held_bytes["measured"]
    assert compared.sent_bytes["predicted"] == compared.sent_bytes["measured"]
    assert compared.equal
    assert compared.same_weights_as_one_process
    assert compared.bitwise
    return compared


@pytest.mark.parametrize("recipe", PRECISIONS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_derived_is_counted_and_bits_are_those_of_one_process(world_of, stage, ranks, recipe):
    compared = expect_agreement(measure(stage, ranks, recipe, steps=4, world=world_of(ranks)))
    assert compared.params % ranks or ranks == 1  # the size does not divide
    assert compared.control_bytes == 0
    assert compared.losses[-1] < compared.losses[0]


@pytest.mark.parametrize("ranks", [5, 7, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_more_ranks_than_cores_change_nothing(world_of, stage, ranks):
    expect_agreement(measure(stage, ranks, steps=2, world=world_of(ranks), engine=fast(stage)))


def fast(stage):
    return {name: True for name in FAST if stage == 3 or (stage, name) == (2, "overlap")}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "more",
    [
        {"micro_batches": 3},
        {"micro_batches": 2, "max_norm": 0.3},
        {"model": GPTConfig(tied=True)},
        {"model": GPTConfig(dropout=0.2)},
        {"model": GPTConfig(recompute=True, dropout=0.2)},
        {"model": GPTConfig(width=2, heads=1, layers=1)},  # shards of a few elements
    ],
    ids=lambda more: "-".join(more),
)
def test_all_that_training_needs_changes_no_bit(world_of, stage, more):
    expect_agreement(measure(stage, 3, steps=3, world=world_of(3), **more))


@pytest.mark.parametrize(
    "engine", [{"overlap": True}, {"prefetch": True}, {"overlap": True, "prefetch": True}]
)
def test_overlap_and_prefetch_send_the_same_bytes_and_change_no_bit(world_of, engine):
    expect_agreement(measure(3, 4, steps=3, world=world_of(4), engine=engine, micro_batches=2))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_accumulation_sends_2_2_a_plus_1_and_3a(world_of, micro_batches):
    passes = {}
    for stage in STAGES:
        done = measure(stage, 4, steps=1, world=world_of(4), micro_batches=micro_batches)
        padded = done.params + done.padding
        passes[stage] = done.sent_bytes["measured"]["total"] / (2 * padded * 3 / 4)
    a = micro_batches
    assert passes == {0: 2, 1: 2, 2: a + 1, 3: 3 * a}


def test_clipping_by_the_global_norm_changes_the_weights_alike_at_every_stage(world_of):
    free = measure(1, 3, steps=2, world=world_of(3))
    clipped = [measure(s, 3, steps=2, world=world_of(3), max_norm=1e-9) for s in STAGES]
    assert len({c.losses[-1] for c in clipped}) == 1
    assert clipped[0].losses[-1] != free.losses[-1]
    # two float64 numbers, of which each rank sends its own to two others
    assert {c.control_bytes for c in clipped} == {16}


def test_one_rank_sends_nothing(world_of):
    for stage in STAGES:
        compared = measure(stage, 1, steps=2, world=world_of(1))
        assert set(compared.sent_bytes["measured"].values()) == {0}


def test_stages_have_the_same_losses(world_of):
    losses = [measure(stage, 4, steps=4, world=world_of(4)).losses for stage in STAGES]
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_a_tied_matrix_is_counted_once(world_of):
    tied = measure(1, 2, steps=1, world=world_of(2), model=GPTConfig(tied=True))
    free = measure(1, 2, steps=1, world=world_of(2))
    assert free.params - tied.params == 13 * 64


@pytest.mark.parametrize("stage", STAGES)
def test_wire_and_sent_bytes_agree(world_of, stage):
    wide = GPTConfig(width=192, layers=1)  # about 0.5 million parameters: 20 MB in five steps
    compared = measure(stage, 4, steps=5, world=world_of(4), model=wide)
    if compared.wire_bytes is None:
        pytest.skip(str(compared.wire_reason))
    assert abs(compared.wire_bytes / compared.sent_bytes["measured"]["total"] - 1) < 0.02


def tensors_left_after(job):
    import gc
    import warnings

    import torch

    from zerolab.practice.measure import count

    warnings.simplefilter("ignore")  # what gc lists includes torch's deprecated aliases

    def alive():
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    before = alive()
    count(job)
    return alive() - before


def peak_of_building_stage_3(config):
    from zerolab.practice.comm import Comm
    from zerolab.practice.gpt import GPT, num_parameters
    from zerolab.practice.meter import Meter
    from zerolab.practice.stage3 import Stage3

    with Meter() as meter:
        engine = Stage3(GPT(config), Comm())
    return num_parameters(engine.model), max(unit.padded for unit in engine.units), meter.peak


def test_building_stage_3_never_holds_a_second_copy_of_the_whole_model(world_of):
    params, largest, peak = world_of(4).run(peak_of_building_stage_3, GPTConfig(layers=12))[0]
    # the fp32 weights it is given shrink as fast as 16/4 bytes of shards grow; one unit more
    assert peak < 4 * params + 16 * largest < 5.5 * params


def gradient_memory_after_a_step(stage):
    from zerolab.practice import data
    from zerolab.practice.comm import Comm
    from zerolab.practice.gpt import GPT

    model = GPT()
    engine = STAGES[stage](model, Comm())
    engine.backward(model.loss(*data.batch(0, engine.comm.rank, 2)))
    before = [unit.full_grads for unit in engine.units]
    engine.step()
    return [
        a is b is not None
        for a, b in zip(before, (u.full_grads for u in engine.units), strict=True)
    ]


def test_stages_0_and_1_keep_the_memory_of_their_gradients_and_2_and_3_free_it(world_of):
    kept = {stage: any(world_of(2).run(gradient_memory_after_a_step, stage)[0]) for stage in STAGES}
    assert kept == {0: True, 1: True, 2: False, 3: False}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_dropped_leaves_no_tensor(world_of, stage):
    job = Job(stage, steps=1, engine=fast(stage))
    assert world_of(2).run(tensors_left_after, job) == [0, 0]


def test_every_recipe_that_ranks_can_run_is_derived_with_the_same_bytes():
    for name, precision in PRECISIONS.items():
        recipe = RECIPES[name]
        assert recipe.parameter == precision.working.itemsize
        assert recipe.gradient == precision.gradient.itemsize
        assert ("master weight" in dict(recipe.optimizer)) == precision.master_weights


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage": 9, "ranks": 2}, "choose one of"),
        ({"stage": 1, "ranks": 2, "recipe": "adam-9000"}, "adamw-mixed"),
        ({"stage": 1, "ranks": 2, "steps": 0}, "at least 1"),
        ({"stage": 1, "ranks": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        measure(**arguments)
