"""Mistakes are named in one sentence, on real ranks; the world and the engine stay usable."""

import sys

import cloudpickle
import pytest
import torch

from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.world import RankError, RankTimeout

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import pytest

STAGES = (0, 1, 2, 3)
SMALL = GPTConfig(width=12, heads=2, layers=1)
ENGINE = {0: {}, 1: {}, 2: {"overlap": True}, 3: {"overlap": True, "prefetch": True}}


def begin(stage, make=lambda: GPT(SMALL)):
    from zerolab.practice.comm import Comm
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import STAGES as ENGINES

    namespace()["engine"] = ENGINES[stage](make(), Comm(), **ENGINE[stage])


def passes(number=1, step=True, loss_of=lambda model, batch: model.loss(*batch)):
    """Backward passes, and perhaps a step; returns the last loss and the weights' bits."""
    from zerolab.practice import data
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import digest

    engine = namespace()["engine"]
    for at in range(number):
        batch = data.batch(at, engine.comm.rank, engine.comm.world_size, 2, 1)
        loss = loss_of(engine.model, batch)
        engine.backward(loss)
    if step:
        engine.step()
    return loss.item(), [digest(u.adamw.master) for u in engine.units if u.trainable]


def train_step_of(loss_of):
    from zerolab.practice import data
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.step import train_step

    engine = namespace()["engine"]
    engine.model.loss = lambda *batch: loss_of(engine.model, batch)
    try:
        train_step(engine, [data.batch(0, engine.comm.rank, engine.comm.world_size, 2, 1)])
    finally:
        del engine.model.loss


def change(how, rank=None):
    from zerolab.practice.launcher.rank import namespace

    engine = namespace()["engine"]
    if rank in (None, engine.comm.rank):
        how(engine.model)


def expect_refusal(call, words, kind):
    """A RankError of one sentence: its first line says it all, and no gloo error is blamed."""
    with pytest.raises(RankError) as refused:
        call()
    sentence = str(refused.value)
    assert words in sentence
    assert f"{kind}: " in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")


def per_token(model, batch):
    """A loss for each token, which somebody forgot to average."""
    tokens, targets = batch
    logits = model(tokens).float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")


def without_graph(model, batch):
    with torch.no_grad():
        return model.loss(*batch)


LOSSES = {
    "a-number": (lambda model, batch: model.loss(*batch).item(), "backward needs the loss as a"),
    "not-a-scalar": (per_token, "a loss that is one number, and this one has the shape [18]"),
    "no-graph": (without_graph, "The loss depends on no parameter that is trained"),
}


@pytest.mark.parametrize(("loss_of", "words"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_backward_cannot_use_is_refused(world_of, stage, loss_of, words):
    world = world_of(2)
    world.run(begin, stage)
    expected = world.run(passes)
    world.run(begin, stage)
    expect_refusal(lambda: world.run(passes, 1, True, loss_of), words, "StepError")
    if loss_of is per_token:
        expect_refusal(lambda: world.run(train_step_of, loss_of), words, "StepError")
    assert world.run(passes) == expected  # the same engine goes on, and nothing was left in it


def replaced(model):
    model.head.out.bias = torch.nn.Parameter(torch.zeros(13, dtype=torch.bfloat16))


def swapped(model):
    model.blocks[0].up = torch.nn.Linear(12, 48, dtype=torch.bfloat16)


def added(model):
    model.head.extra = torch.nn.Parameter(torch.zeros(3))


def removed(model):
    model.head.out.bias = None


def seeded(rank=None):
    """A model whose weights differ on that rank, in one that is tied, beside odd parameters."""
    import torch.distributed as dist

    model = GPT(SMALL)
    model.head.none = torch.nn.Parameter(torch.empty(0))
    model.head.one = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
    model.head.tied = model.head.out.bias
    if dist.get_rank() == rank:
        model.head.out.bias.data[3] = 1e-7
    return model


@pytest.mark.parametrize("stage", [*STAGES, "offload"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_weights_that_differ_between_ranks_are_refused_on_every_rank(world_of, stage, rank):
    def wrap(stage, rank):
        from zerolab.practice.comm import Comm
        from zerolab.practice.measure import STAGES as ENGINES
        from zerolab.practice.meter import Meter
        from zerolab.practice.offload import Offloaded

        with Meter() as meter:
            try:
                if stage == "offload":
                    Offloaded(3, seeded(rank), Comm())
                else:
                    ENGINES[stage](seeded(rank), Comm())
            except ValueError as error:
                return str(error), meter.sent_bytes()["total"]
            return "", meter.sent_bytes()["total"]

    world, first = world_of(3), rank or 1  # all others differ from a rank 0 that is odd
    words = f"Rank {first}'s weights differ from rank 0's: call torch.manual_seed(0) on every rank"
    assert all(said.startswith(words) for said, _ in world.run(wrap, stage, rank))
    assert world.run(wrap, stage, None) == [("", 0)] * 3
    assert world_of(1).run(wrap, stage, 0) == [("", 0)]


@pytest.mark.parametrize("stage", [2, 3])
def test_units_in_another_order_on_one_rank_are_refused_on_every_rank(world_of, stage):
    def wrap(stage):
        import torch
        import torch.distributed as dist

        from zerolab.practice.comm import Comm
        from zerolab.practice.measure import STAGES as ENGINES

        torch.manual_seed(0)
        model = GPT(GPTConfig(width=12, heads=2, layers=2))
        if dist.get_rank() == 2:
            first, *blocks, last = model.units()
            model.units = lambda: [first, *reversed(blocks), last]
        try:
            ENGINES[stage](model, Comm())
        except ValueError as error:
            return str(error)

    said = world_of(3).run(wrap, stage)
    assert said[0].startswith("Rank 2's weights differ from rank 0's")
    assert "units() return its modules in the same order" in said[0] and len(set(said)) == 1


def loaded(model):
    model.load_state_dict({})


def loaded_in_part(model):
    model.head.norm.load_state_dict({"weight": torch.ones(12), "bias": torch.ones(12)})


@pytest.mark.parametrize("how", [loaded, loaded_in_part])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_loaded_after_wrapping_are_refused_and_none_is_changed(
    world_of, stage, how
):
    world = world_of(2)
    world.run(begin, stage)
    expected = world.run(passes)
    world.run(begin, stage)
    expect_refusal(
        lambda: world.run(change, how),
        "load_state_dict after a stage has wrapped the model would be undone by the next step: "
        "load the weights before you wrap it, or go on from a checkpoint of zerolab",
        "RuntimeError",
    )
    assert world.run(passes) == expected


def moved(model):
    model.head.norm.weight.data = model.head.norm.weight.data.float()


def other_data(model):
    model.head.norm.weight.data = torch.ones(12, dtype=torch.bfloat16)


def frozen_late(model):
    model.head.norm.weight.requires_grad = False


CHANGES = {
    replaced: "The parameter head.out.bias was replaced after",
    swapped: "The parameter blocks.0.up.weight was replaced after",
    added: "The parameter head.extra was added after",
    removed: "The parameter head.out.bias was removed after",
    other_data: "The parameter head.norm.weight was given other data after",
    frozen_late: "The parameter head.norm.weight was frozen after",
}


@pytest.mark.parametrize(
    ("how", "words"), CHANGES.items(), ids=lambda c: getattr(c, "__name__", "")
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_changes_after_wrapping_is_refused_with_the_parameter_s_name(
    world_of, stage, how, words
):
    world = world_of(2)
    world.run(begin, stage)
    expected = world.run(passes)
    world.run(begin, stage)
    world.run(change, how)
    expect_refusal(lambda: world.run(passes), words, "RuntimeError")
    world.run(begin, stage)
    world.run(change, how, 1)  # on one rank alone: it says so, and the other is freed
    expect_refusal(lambda: world.run(passes), "rank 1: RuntimeError: The parameter", "RuntimeError")
    world.run(begin, stage)
    assert world.run(passes) == expected


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_of_another_dtype_is_refused(world_of, stage):
    """At stage 3 torch itself refuses: there is nothing to convert while a unit is not gathered."""
    world = world_of(2)
    world.run(begin, stage)
    world.run(change, moved)
    words = "The parameter head.norm.weight was moved to torch.float32 after"
    expect_refusal(lambda: world.run(passes), words, "RuntimeError")


class Twice(GPT):
    """Runs its block twice: the same parameters at two depths."""

    def forward(self, tokens):
        return self.head(self.blocks[0](self.blocks[0](self.embedding(tokens))))


def test_stage_3_refuses_a_unit_that_runs_twice_in_one_forward_pass(world_of):
    world = world_of(2)
    world.run(begin, 3, lambda: Twice(SMALL))
    words = "The module number 1 of model.units() ran twice in one forward pass"
    expect_refusal(lambda: world.run(passes), words, "RuntimeError")
    world.run(begin, 3)
    assert world.run(passes)[0][0] > 0


def test_the_other_stages_add_the_gradients_of_a_unit_that_runs_twice(world_of):
    from zerolab.practice.measure import Job, digest, train_in_one_process

    world = world_of(2)
    for stage in (0, 1, 2):
        job = Job(stage, model=SMALL, steps=1, build=Twice)
        (expected,) = world.run(lambda job=job: train_in_one_process(job, 2)[0], ranks=[0])
        counted = world.run(weights_after, job)
        assert [digest(weights) for weights in counted] == [digest(expected)] * 2


def weights_after(job):
    from zerolab.practice.measure import count

    return count(job).weights


class Outside(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.extra = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_outside_all_units_is_refused(world_of, stage):
    world = world_of(2)
    words = "The parameter extra is in no unit: model.units() must list modules"
    expect_refusal(lambda: world.run(begin, stage, lambda: Outside(SMALL)), words, "ValueError")
    world.run(begin, stage)
    assert world.run(passes)[0][0] > 0


class Units(GPT):
    """A GPT that says of its units what it is told to."""

    def __init__(self, how):
        super().__init__(SMALL)
        self.how = how

    def units(self):
        return self.how(self)


UNITS = {
    lambda m: None: "TypeError: model.units() must return a list of modules",
    lambda m: []: "TypeError: model.units() must return a list of modules",
    lambda m: ["embedding"]: "TypeError: model.units() must return a list of modules",
    lambda m: dict(m.named_children()): "TypeError: model.units() must return a list of modules",
    lambda m: set(GPT.units(m)): "TypeError: model.units() must return a list of modules",
    lambda m: [torch.nn.Linear(2, 2), *GPT.units(m)]: "ValueError: model.units() lists a Linear "
    "that is not in it",
    lambda m: [m, m.head]: "ValueError: model.units() lists a Units and, on its own, a Head inside",
}


@pytest.mark.parametrize(("how", "words"), UNITS.items(), ids=range(len(UNITS)))
@pytest.mark.parametrize("stage", [2, 3])
def test_units_that_are_no_list_of_the_model_s_modules_are_refused(world_of, stage, how, words):
    kind, sentence = words.split(": ")
    make = lambda: Units(how)  # noqa: E731
    expect_refusal(lambda: world_of(2).run(begin, stage, make), sentence, kind)


def test_units_may_be_any_series_of_modules(world_of):
    for how in (lambda m: tuple(GPT.units(m)), lambda m: iter(GPT.units(m)), lambda m: [m]):
        world_of(2).run(begin, 3, lambda how=how: Units(how))
        assert world_of(2).run(passes)[0][0] > 0


def wrap_again(stage):
    from zerolab.practice.comm import Comm
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import STAGES as ENGINES

    ENGINES[stage](namespace()["engine"].model, Comm())


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_in_a_stage_goes_into_no_other(world_of, stage):
    world = world_of(2)
    world.run(begin, stage)
    expected = world.run(passes)
    for other in STAGES:
        world.run(begin, stage)
        words = "This model is in a stage already: make a new one"
        expect_refusal(lambda other=other: world.run(wrap_again, other), words, "ValueError")
        assert world.run(passes) == expected


def offloaded_pass(loss_of):
    from zerolab.practice import data
    from zerolab.practice.comm import Comm
    from zerolab.practice.offload import Offloaded

    comm, model = Comm(), GPT(SMALL)
    engine, batch = Offloaded(2, model, comm), data.batch(0, comm.rank, comm.world_size, 2, 1)
    said = ""
    try:
        engine.backward(loss_of(model, batch))
    except ValueError as error:
        said = str(error)
    engine.backward(model.loss(*batch))
    engine.step()
    engine.close()
    return said, engine.broken


@pytest.mark.parametrize(("loss_of", "words"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_none_does_not_break_an_offloaded_engine(world_of, loss_of, words):
    for said, broken in world_of(2).run(offloaded_pass, loss_of):
        assert words in said
        assert broken == ""


def step_by(max_norm):
    from zerolab.practice.launcher.rank import namespace

    namespace()["engine"].step(max_norm)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_largest_norm_that_is_none_is_refused(world_of, stage, max_norm):
    world = world_of(2)
    world.run(begin, stage)
    before = world.run(weights)
    world.run(passes, 1, False)
    expect_refusal(lambda: world.run(step_by, max_norm), f"max_norm is {max_norm}", "StepError")
    assert world.run(weights) == before


def weights():
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import digest

    return [digest(u.adamw.master) for u in namespace()["engine"].units]


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_that_is_not_finite_changes_no_weight(world_of, stage, factor):
    world = world_of(2)
    world.run(begin, stage)
    before = world.run(weights)
    world.run(passes, 1, False, lambda model, batch: model.loss(*batch) * factor)
    words = "The gradients' norm is not finite; no weight was changed."
    expect_refusal(lambda: world.run(step_by, 1.0), words, "GradientOverflow")
    assert world.run(weights) == before


def as_many_passes_as_my_rank():
    from zerolab.practice.launcher.rank import namespace

    passes(1 + namespace()["engine"].comm.rank)


def test_ranks_with_other_numbers_of_passes_are_told_who_waits(world_of):
    world = world_of(2)
    world.run(begin, 3)
    with pytest.raises(RankTimeout, match="rank 0 done; rank 1 waiting for other ranks"):
        world.run(as_many_passes_as_my_rank, timeout=3)


def fail_on(rank, in_backward, place):
    """One rank alone fails at a unit, in forward or backward; the others wait for it."""
    from zerolab.practice.launcher.rank import namespace

    def stop(*_):
        raise MemoryError("on purpose")

    engine = namespace()["engine"]
    module, hook = engine.model.units()[place], None
    if engine.comm.rank == rank and in_backward:
        hook = next(module.parameters()).register_hook(stop)
    elif engine.comm.rank == rank:
        hook = module.register_forward_hook(stop)
    try:
        passes()
    finally:
        if hook:
            hook.remove()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_goes_on_after_one_rank_alone_has_failed(world_of, stage, in_backward, place):
    world = world_of(2)
    world.run(begin, stage)
    expected = [world.run(passes), world.run(passes)]
    world.run(begin, stage)
    with pytest.raises(RankError, match="rank 1: MemoryError: on purpose"):
        world.run(fail_on, 1, in_backward, place)
    assert [world.run(passes), world.run(passes)] == expected


def fail_in_backward(where):
    """A backward pass that is torn off when it comes to a parameter, as by a full device."""
    from zerolab.practice.launcher.rank import namespace

    def stop(grad):
        raise MemoryError("on purpose")

    engine = namespace()["engine"]
    hook = dict(engine.model.named_parameters())[where].register_hook(stop)
    try:
        passes(2, step=False)
    except MemoryError:
        return "torn off"
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "where", ["head.norm.bias", "blocks.0.up.weight", "embedding.token.weight"]
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_that_was_torn_off_leaves_nothing_to_the_next_step(world_of, stage, where):
    world = world_of(2)
    world.run(begin, stage)
    expected = [world.run(passes, 2), world.run(passes)]
    world.run(begin, stage)
    assert world.run(fail_in_backward, where) == ["torn off"] * 2
    assert [world.run(passes, 2), world.run(passes)] == expected
