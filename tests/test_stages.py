"""Stages 0 to 3: derived bytes are counted bytes, and the weights have the bits of one process."""

import sys
from dataclasses import replace

import cloudpickle
import pytest

from zerolab.course.measure import measure
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.measure import STAGES, Job
from zerolab.practice.precision import PRECISIONS
from zerolab.theory.memory import RECIPES
from zerolab.theory.plan import plan
from zerolab.theory.strategy import Strategy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import pytest

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


@pytest.mark.parametrize(
    ("ranks", "recipe"),  # every number of ranks, and every recipe where the size does not divide
    [*((ranks, "adamw-mixed") for ranks in RANKS)]
    + [(3, recipe) for recipe in PRECISIONS if recipe != "adamw-mixed"],
)
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


FROZEN = {
    "first-unit": ("embedding",),  # forward alone needs it
    "first-units": ("embedding", "blocks.0"),
    "middle-unit": ("blocks.0",),
    "last-unit": ("head",),
    "part-of-a-unit": ("blocks.1.qkv", "embedding.token"),
    "all-but-the-first": ("blocks", "head"),
}
SMALL = GPTConfig(width=12, heads=2, layers=2)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_have_no_gradients_no_states_and_the_bits_of_one_process(
    world_of, stage, names, ranks
):
    world, model = world_of(ranks), replace(SMALL, frozen=names)
    more = {"micro_batches": 2, "max_norm": 0.3, "engine": fast(stage), "steps": 2}
    expect_agreement(measure(stage, ranks, world=world, model=model, **more))


@pytest.mark.parametrize("names", [("embedding",), ("blocks.0",)])
def test_stage_3_gathers_for_backward_only_what_backward_comes_to(world_of, names):
    world, model = world_of(2), replace(SMALL, frozen=names)
    compared = measure(3, 2, steps=1, world=world, model=model, engine=FAST)
    params = dict(GPT(SMALL).named_parameters())
    even = [
        -(-sum(p.numel() for n, p in params.items() if n.startswith(unit)) // 2) * 2
        for unit in ("embedding", "blocks.0", "blocks.1", "head")
    ]
    passes = 2 * sum(even) - (even[0] if names == ("embedding",) else 0)
    assert compared.sent_bytes["measured"]["all_gather"] == 2 * passes // 2


@pytest.mark.parametrize("stage", STAGES)
def test_the_planner_s_frozen_parameters_are_those_that_are_counted(world_of, stage):
    sizes = replace(SMALL, vocab=14)  # even units, so that two ranks pad nothing
    model = replace(sizes, frozen=("blocks.0",))
    compared = measure(stage, 2, steps=1, world=world_of(2), model=model)
    frozen = sum(p.numel() for p in GPT(model).parameters() if not p.requires_grad)
    planned = plan(compared.params, 2, Strategy(stage, frozen=frozen))
    assert compared.padding == 0
    assert planned.held == compared.held_bytes["measured"]
    assert planned.sent == compared.sent_bytes["measured"]


def with_nothing(config):
    """The small GPT with a parameter of no elements in a unit, and a frozen one in another."""
    import torch

    model = GPT(config)
    model.blocks[0].nothing = torch.nn.Parameter(torch.empty(0, 3))
    frozen = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    model.head.nothing = frozen
    return model


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_elements_changes_no_bit_and_no_byte(world_of, stage, ranks):
    more = {"steps": 2, "world": world_of(ranks), "model": SMALL, "engine": fast(stage)}
    compared = expect_agreement(measure(stage, ranks, build=with_nothing, **more))
    free = measure(stage, ranks, **more)
    assert compared.held_bytes == free.held_bytes
    assert compared.sent_bytes == free.sent_bytes
    assert compared.losses == free.losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_recomputation_with_prefetch_gathers_no_unit_a_third_time(world_of, ranks):
    model = replace(SMALL, recompute=True)
    expect_agreement(measure(3, ranks, steps=2, world=world_of(ranks), model=model, engine=FAST))


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


def gradients_of_two_layers_in_a_step_without_the_second(stage):
    import torch

    from zerolab.practice.comm import Comm
    from zerolab.practice.sharding import views

    model = torch.nn.Sequential(torch.nn.Linear(3, 1, False), torch.nn.Linear(2, 1, False))
    engine = STAGES[stage](model, Comm())
    engine.backward(model[0].weight.sum() + model[1].weight.sum())
    engine.step()
    engine.backward(model[0].weight.sum())
    (unit,) = engine.units
    return [grads.tolist() for grads in views(unit.grads(), unit.shapes)]


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_step_does_not_use_has_no_gradient_left_from_the_step_before(world_of, stage):
    seen = world_of(2).run(gradients_of_two_layers_in_a_step_without_the_second, stage)
    assert seen == [[[[1, 1, 1]], [[0, 0]]]] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_dropped_leaves_no_tensor(world_of, stage):
    job = Job(stage, steps=1, engine=fast(stage))
    assert world_of(2).run(tensors_left_after, job) == [0, 0]


def test_every_recipe_that_ranks_can_run_is_derived_with_the_same_bytes():
    for name, precision in PRECISIONS.items():
        recipe = RECIPES[precision.bytes_of]
        assert precision.bytes_of == name or name not in RECIPES  # an alias hides no recipe
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
        ({"stage": 1, "ranks": 2, "micro_batches": 0}, "at least 1"),
        ({"stage": 1, "ranks": 2, "max_norm": 0.0}, "above 0"),
        ({"stage": 1, "ranks": 2, "engine": {"overlap": True}}, "no overlap: it begins with st"),
        ({"stage": 2, "ranks": 2, "engine": {"prefetch": True}}, "no prefetch: it begins with"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        measure(**arguments)


def test_a_measurement_may_take_as_long_as_its_steps_do(monkeypatch):
    import zerolab.course.measure as stages
    import zerolab.course.offload as below

    limits = []

    def began(size, timeout=60, **_):
        limits.append(timeout)
        raise RuntimeError("enough is known")

    for module in (stages, below):
        monkeypatch.setattr(module, "World", began)
    with pytest.raises(RuntimeError, match="enough"):
        stages.measure(1, 2, steps=100_000)
    with pytest.raises(RuntimeError, match="enough"):
        below.measure_offload(1, 2, below.Offload(), steps=100_000)
    assert limits == [3600, 3600]
