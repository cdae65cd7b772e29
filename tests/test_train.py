"""Training: tokens count alike, mistakes have names, and a resumed run is the uninterrupted one."""

import dataclasses
import io
import itertools
import json
import os
import signal
import subprocess
import sys

import cloudpickle
import pytest
import torch
from test_cli import run

from zerolab.practice import data
from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.measure import Job, train_in_one_process
from zerolab.practice.precision import LossScale
from zerolab.practice.train import Training, on_rank, right_answers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import pytest

STAGES = (0, 1, 2, 3)
SMALL = GPTConfig(width=12, heads=2, layers=1)
FORGETFUL = AdamWOptions(beta1=0.0)  # its momentum is the last gradient


# ---- what ranks run


def begin(stage, recipe="adamw-mixed", options=None, config=SMALL, loss_scale=None):
    from zerolab.practice.comm import Comm
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import STAGES as ENGINES

    namespace()["engine"] = ENGINES[stage](GPT(config), Comm(), options, recipe)
    namespace()["loss_scale"] = loss_scale


def weights(state="master"):
    """The fp32 weights, or another state, whole and in one flat tensor (Ψ,)."""
    from zerolab.practice.launcher.rank import namespace

    engine, found = namespace()["engine"], {}
    for unit in engine.units:
        found |= unit.whole(getattr(unit.adamw, state), engine.comm)
    names = [name for name, _ in engine.model.named_parameters()]
    return torch.cat([found[name].flatten() for name in names])


def step(batches_of, max_norm=None):
    """One step with `batches_of(rank, world_size)`; its loss, or the sentence of the refusal."""
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.step import StepError, train_step

    engine = namespace()["engine"]
    try:
        batches = batches_of(engine.comm.rank, engine.comm.world_size)
        return train_step(engine, batches, max_norm, namespace()["loss_scale"])
    except StepError as refusal:
        return str(refusal)


def optimizer_bits():
    """This rank's master weights, moments and working parameters, and how many updates there were.

    Whole gradients or shards of them that a step has left would be in it too, but for memory that
    the next backward pass writes over.
    """
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import digest

    flats, left = [], []
    for unit in namespace()["engine"].units:
        flats += [unit.adamw.master, unit.adamw.momentum, unit.adamw.variance, unit.param_shard]
        added_to = len(unit._unwritten) < len(unit.params)
        left += [unit.grad_shard] if unit.grad_shard is not None else []
        left += [unit.full_grads] if unit.full_grads is not None and added_to else []
    return [digest(flat) for flat in (*flats, *left)], unit.adamw.steps


def the_loss_scale():
    from zerolab.practice.launcher.rank import namespace

    return namespace()["loss_scale"]


def poison(rank, name, value=float("nan")):
    """Makes one rank's gradient of one parameter NaN, or another value, until it is healed.

    With `rank` None, the gradients of all ranks.
    """
    from zerolab.practice.launcher.rank import namespace

    engine = namespace()["engine"]
    param = dict(engine.model.named_parameters())[name]
    if rank in (None, engine.comm.rank):
        namespace()["poison"] = param.register_hook(lambda grad: torch.full_like(grad, value))


def heal():
    from zerolab.practice.launcher.rank import namespace

    if "poison" in namespace():
        namespace().pop("poison").remove()


def trainer_state():
    """The bits of everything that a Trainer's rank holds, its random state and its curve."""
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import digest

    trainer, flats = namespace()["trainer"], []
    for unit in trainer.engine.units:
        adamw = unit.adamw
        flats += [adamw.master, adamw.momentum, adamw.variance, unit.param_shard]
    bits = [digest(flat) for flat in (*flats, torch.get_rng_state())]
    return bits, trainer.steps, trainer.about, unit.adamw.steps, trainer.loss_scale


# ---- a step


def one_each(rank, world_size):
    return [data.batch(0, rank, world_size, 2, 1)]


def uneven(rank, world_size):
    """Micro-batches of other lengths and numbers of sequences; on rank 1 many targets are out."""
    tokens, targets = data.batch(1, rank, world_size, 3, 1)
    if rank == 1:
        targets[:, :6] = -100
    return [data.batch(0, rank, world_size, 1 + 3 * rank, 2 + rank), (tokens, targets)]


@pytest.mark.parametrize("stage", STAGES)
def test_with_equal_token_counts_a_step_has_the_bits_of_one_process(world_of, stage):
    world, job = world_of(3), Job(stage, steps=2, micro_batches=3, max_norm=0.3, model=SMALL)
    world.run(begin, stage)
    for number in range(job.steps):
        world.run(
            step,
            lambda rank, n, number=number: [data.batch(3 * number + m, rank, n) for m in range(3)],
            0.3,
        )
    (expected,) = world.run(lambda: train_in_one_process(job, 3)[0], ranks=[0])
    assert torch.equal(world.run(weights)[0], expected)


@pytest.mark.parametrize("stage", STAGES)
def test_with_unequal_counts_each_token_weighs_the_same(world_of, stage):
    """Against the mean over all tokens in one process; at most 1e-5 of the largest gradient off."""
    world = world_of(3)
    world.run(begin, stage, "adamw-fp32", FORGETFUL)
    losses = world.run(step, uneven)
    model = GPT(SMALL)
    batches = [batch for rank in range(3) for batch in uneven(rank, 3)]
    counts = [int((targets != -100).sum()) for _, targets in batches]
    assert len(set(counts)) > 3
    mean = sum(model.loss(*b) * c for b, c in zip(batches, counts, strict=True)) / sum(counts)
    mean.backward()
    grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    difference = world.run(weights, "momentum")[0] - grad
    assert difference.abs().max() < 1e-5 * grad.abs().max()
    assert losses == [pytest.approx(mean.item(), rel=1e-6)] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_other_numbers_of_micro_batches_are_named_before_the_hang(world_of, stage):
    world = world_of(3)
    world.run(begin, stage)
    before = world.run(weights)[0]
    said = world.run(step, lambda rank, n: one_each(rank, n) * (3 if rank == 2 else 2))
    assert said[0].startswith("Rank 2 has 3 micro-batches and rank 0 has 2: ")
    assert said == [said[0]] * 3
    said = world.run(step, lambda rank, n: one_each(rank, n) if rank != 1 else [])
    assert said[0].startswith("Rank 1 has 0 micro-batches")
    empty = (torch.zeros(2, 3, dtype=torch.long), torch.full((2, 3), -100))
    said = world.run(step, lambda rank, n: [empty] if rank == 1 else one_each(rank, n))
    assert "Rank 1 has no micro-batch, or one without a token" in said[0]
    assert torch.equal(world.run(weights)[0], before)
    assert world.run(step, one_each)[0] > 0  # the world stays usable, and the engine too


@pytest.mark.parametrize("stage", STAGES)
def test_nan_gradients_are_named_by_rank_and_parameter_and_change_nothing(world_of, stage):
    world = world_of(3)
    world.run(begin, stage)
    before = world.run(weights)[0]
    world.run(poison, 1, "blocks.0.up.weight")
    said = world.run(step, lambda rank, n: one_each(rank, n) * 2)
    world.run(heal)
    assert said == [said[0]] * 3
    assert said[0].startswith("The gradient of blocks.0.up.weight on rank 1 is not finite")
    assert torch.equal(world.run(weights)[0], before)
    healed = world.run(step, one_each)
    after = world.run(weights)[0]
    world.run(begin, stage)
    assert world.run(step, one_each) == healed
    assert torch.equal(world.run(weights)[0], after)  # nothing of the bad step was left


# ---- a step in fp16


FP16 = "adamw-mixed-fp16"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_with_a_loss_scale_steps_and_skipped_steps_have_the_bits_of_one_process(
    world_of, stage, ranks
):
    world, begins = world_of(ranks), LossScale(2.0**22, growth_interval=2)
    job = Job(stage, FP16, SMALL, steps=9, micro_batches=3, max_norm=0.3, loss_scale=begins)
    world.run(begin, stage, FP16, None, SMALL, begins)
    scales = []
    for number in range(job.steps):
        world.run(
            step,
            lambda rank, n, number=number: [data.batch(3 * number + m, rank, n) for m in range(3)],
            0.3,
        )
        told = world.run(the_loss_scale)
        assert told == [told[0]] * ranks
        scales.append(told[0].scale)
    assert scales[0] < begins.scale  # the first step was skipped
    assert max(after / before for before, after in itertools.pairwise(scales)) == 2  # it grew, too
    assert 0 < told[0].skipped_steps < job.steps - 2
    (expected,) = world.run(lambda: train_in_one_process(job, ranks)[0], ranks=[0])
    assert torch.equal(world.run(weights)[0], expected)


@pytest.mark.parametrize(
    ("rank", "value"),
    [(1, float("inf")), (2, float("nan")), (None, 40_000.0)],
    ids=["inf-on-one-rank", "nan-on-one-rank", "in-the-sum-alone"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_anywhere_skips_the_step_everywhere_and_changes_no_bit(
    world_of, stage, rank, value
):
    world = world_of(3)
    world.run(begin, stage, FP16, None, SMALL, LossScale(1024.0))
    world.run(step, one_each)
    before = world.run(optimizer_bits)
    world.run(poison, rank, "blocks.0.up.weight", value)  # 40,000 fits in fp16, its sum does not
    losses = world.run(step, one_each)
    assert losses == [losses[0]] * 3
    assert losses[0] > 0
    world.run(heal)
    assert world.run(optimizer_bits) == before
    halved = LossScale(512.0, good_steps=0, skipped_steps=1)
    assert world.run(the_loss_scale) == [halved] * 3
    world.run(step, one_each)
    assert world.run(the_loss_scale) == [dataclasses.replace(halved, good_steps=1)] * 3
    after = world.run(weights)[0]
    world.run(begin, stage, FP16, None, SMALL, LossScale(1024.0))
    world.run(step, one_each)
    world.run(step, one_each)  # no overflow, and a scale that is a power of two: the same bits
    assert torch.equal(world.run(weights)[0], after)


@pytest.mark.parametrize(
    ("rank", "words"),
    [(1, "The gradient of blocks.0.up.weight on rank 1 is not"), (None, "The sum of the grad")],
)
@pytest.mark.parametrize("stage", STAGES)
def test_what_overflows_at_the_smallest_scale_is_an_error_on_all_ranks(
    world_of, stage, rank, words
):
    world = world_of(3)
    world.run(begin, stage, FP16, None, SMALL, LossScale(2.0))
    before = world.run(optimizer_bits)
    world.run(poison, rank, "blocks.0.up.weight", 40_000.0 if rank is None else float("inf"))
    assert world.run(step, one_each)[0] > 0
    said = world.run(step, one_each)
    world.run(heal)
    assert said == [said[0]] * 3
    assert said[0].startswith(words)
    assert world.run(optimizer_bits) == before
    assert world.run(the_loss_scale) == [LossScale(1.0, skipped_steps=1)] * 3
    assert world.run(step, one_each)[0] > 0


def test_the_loss_scale_moves_as_torch_s_own_does():
    torch.manual_seed(0)
    ours = LossScale(growth_interval=5, smallest=0.0)  # torch's own has no smallest
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for overflowed in (torch.rand(400) < 0.15).tolist():
        ours.update(overflowed)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflowed)), 2.0, 0.5, 5)
        assert (ours.scale, ours.good_steps) == (scale.item(), tracker.item())
    assert ours.skipped_steps > 0
    ours = LossScale(1.5)
    ours.update(overflowed=True)
    assert (ours.scale, ours.exhausted) == (1.0, True)  # ours alone: no smaller than that
    torch_s = torch.amp.GradScaler("cpu")
    assert LossScale().scale == torch_s.get_scale()
    assert LossScale().growth == torch_s.get_growth_factor()
    assert LossScale().backoff == torch_s.get_backoff_factor()
    assert LossScale().growth_interval == torch_s.get_growth_interval()


# ---- a training


def scale_from(loss_scale):
    """Gives a Trainer in fp16 another scale to begin with: one that moves within a few steps."""
    from zerolab.practice.launcher.rank import namespace

    if namespace()["trainer"].loss_scale:
        namespace()["trainer"].loss_scale = loss_scale


@pytest.mark.parametrize("recipe", ["adamw-mixed", FP16])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(world_of, tmp_path, stage, recipe):
    config = dataclasses.replace(SMALL, dropout=0.2)  # each rank has random states of its own
    training = Training(stage, recipe, micro_batches=2, lines=11, model=config)
    world, moving = world_of(2), LossScale(2.0**20, growth_interval=2)
    world.run(on_rank, "begin", training, None, False)
    world.run(scale_from, moving)
    for _ in range(2):
        world.run(on_rank, "advance", 3, True)
    uninterrupted = world.run(trainer_state)
    world.run(on_rank, "begin", training, str(tmp_path), False)
    world.run(scale_from, moving)
    world.run(on_rank, "advance", 3, True)
    world.run(lambda: torch.manual_seed(99))
    steps, _, curve, _ = world.run(on_rank, "begin", training, str(tmp_path), True)[0]
    assert (steps, len(curve)) == (3, 1)
    world.run(on_rank, "advance", 3, True)
    assert world.run(trainer_state) == uninterrupted
    if recipe == FP16:
        ended = uninterrupted[0][-1]
        assert 0 < ended.skipped_steps < 6
        assert ended.growth_interval == 2


def save_bare(folder, steps):
    from zerolab.practice import checkpoint
    from zerolab.practice.launcher.rank import namespace

    checkpoint.save(namespace()["trainer"].engine, folder, steps, {"by": "hand"})


def test_a_checkpoint_that_was_saved_by_hand_is_gone_on_from(world_of, tmp_path):
    world, training = world_of(2), Training(1, model=SMALL, lines=11)
    world.run(on_rank, "begin", training, None, False)
    world.run(save_bare, tmp_path, 3)
    steps, _, curve, _ = world.run(on_rank, "begin", training, str(tmp_path), True)[0]
    assert (steps, curve) == (3, [])
    assert world.run(on_rank, "advance", 1, True)[0][0] == 4


def test_the_rate_of_right_answers_rises_far_above_chance(world_of):
    """A layer less than the command's model, and larger steps: the same rise in less time."""
    quick = AdamWOptions(lr=4e-3, beta2=0.98)
    training = Training(3, "adamw-fp32", model=GPTConfig(layers=1), options=quick)
    world = world_of(2)
    world.run(on_rank, "begin", training, None, False)
    for steps in (100, 140):
        curve = world.run(on_rank, "advance", steps, True)[0][2]
    (_, early_loss, early), (_, late_loss, late) = curve
    assert late_loss < early_loss
    assert early < 0.05
    assert late > 0.2  # guessing gives 0.01, and 0.4 was seen


def test_other_rank_counts_read_the_same_lines_once_each(world_of):
    def lines_of_a_step(micro_batches):
        from zerolab.practice.train import Trainer

        trainer = Trainer(Training(1, micro_batches=micro_batches, model=SMALL), None, False)
        trainer.about["next_line"] = 256
        return [data.decode(row.tolist()) for tokens, _ in trainer._batches() for row in tokens]

    expected = sorted(data.line(index)[:-1] for index in range(256, 384))
    for ranks, micro_batches in ((2, 1), (3, 3)):
        read = world_of(ranks).run(lines_of_a_step, micro_batches)
        assert sorted(text for own in read for text in own) == expected


class Calculator(torch.nn.Module):
    """Puts the digit that stands in the sum next, for those lines that it can do."""

    def __init__(self, can):
        super().__init__()
        self.can = can

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, 13)
        for row, line in enumerate(tokens.tolist()):
            text = data.decode(line)
            total = f"{int(text[:2]) + int(text[3:5]):03d}"[::-1]
            digit = total[len(text) - 6] if self.can(text) else "+"
            logits[row, -1, data.encode(digit)[0]] = 1
        return logits


def test_right_answers_are_whole_sums_only():
    kept = range(9_500, 10_000)
    assert right_answers(Calculator(lambda text: True), kept) == 500
    assert right_answers(Calculator(lambda text: len(text) < 8), kept) == 0  # the last is wrong
    even = sum(int(data.line(index)[1]) % 2 == 0 for index in kept)
    assert right_answers(Calculator(lambda text: int(text[1]) % 2 == 0), kept) == even


# ---- the command


def test_train_saves_resumes_at_another_stage_and_keeps_the_curve(capsys, tmp_path):
    save = f"--every 2 --checkpoint {tmp_path}"
    code, out, _ = run(capsys, f"train --stage 0 --ranks 2 --steps 4 {save}")
    assert code == 0
    assert "stage 0 on 2 ranks, 4 steps, adamw-mixed" in out
    assert f"checkpoint     {tmp_path / 'step-00000004'}" in out
    code, out, _ = run(capsys, f"train --stage 3 --ranks 3 --steps 6 {save} --resume --json")
    trained = json.loads(out)
    assert code == 0
    assert [point["step"] for point in trained["curve"]] == [2, 4, 6]
    assert trained["checkpoint"] == str(tmp_path / "step-00000006")
    for line, words in (
        (f"train --stage 3 --ranks 2 {save}", "already holds step-00000006: add --resume"),
        (f"train --stage 3 --ranks 2 --steps 6 {save} --resume", "step 6 was reached already"),
        (f"train --stage 3 --ranks 2 --recipe adamw-fp32 {save} --resume", "recipe adamw-mixed"),
    ):
        code, out, err = run(capsys, line)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


def test_training_in_fp16_tells_its_loss_scale_and_what_was_skipped(capsys):
    line = f"train --stage 1 --ranks 1 --steps 2 --every 2 --recipe {FP16}"
    code, out, err = run(capsys, line)
    assert code == 0
    assert "loss scale 65536, 0 steps skipped" in out.splitlines()
    assert err.endswith(", scale 65536, 0 steps skipped\n")
    code, out, _ = run(capsys, f"{line} --json")
    told = json.loads(out)
    assert (told["recipe"], told["loss_scale"], told["skipped_steps"]) == (FP16, 65536, 0)
    assert str(LossScale(2.0**15, skipped_steps=1)) == "scale 32768, 1 step skipped"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--stage 4", "0, 1, 2, 3"),
        ("--stage 1 --ranks 0", "0"),
        ("--stage 1 --steps 0", "at least 1"),
        ("--stage 1 --every 0", "at least 1"),
        ("--stage 1 --micro-batches -1", "at least 1"),
        ("--stage 1 --micro-batches 65 --ranks 2", "without a token"),
        ("--stage 1 --clip 0", "above 0"),
        ("--stage 1 --clip nan", "above 0"),
        ("--stage 1 --recipe adam-9000", "adamw-mixed"),
        ("--stage 1 --resume", "--checkpoint DIR"),
        ("--stage 1 --steps 1 --seed 4294967296", "below 4294967296"),
        ("--stage 1 --steps 1 --seed -99999999999999999999", "below 4294967296"),
        ("--stage 1 --steps 1 --offload-folder x", "needs --offload"),
        ("--stage 1 --steps 1 --checkpoint pyproject.toml", "into a folder: File exists"),
        ("--stage 1 --steps 1 --checkpoint pyproject.toml/x", "into a folder: Not a directory"),
        ("--stage 1 --resume --checkpoint nowhere", "There is no checkpoint in"),
        ("", "--stage"),
    ],
)
def test_what_makes_no_training_gets_one_sentence_and_exit_2(capsys, arguments, words):
    code, out, err = run(capsys, f"train {arguments}")
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1, err


def test_a_folder_that_cannot_be_written_to_is_named_before_the_first_step(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, out, err = run(capsys, f"train --stage 1 --steps 1 --checkpoint {tmp_path}")
    assert (code, out) == (2, "")
    assert err == f"zerolab train: --checkpoint {tmp_path}: the folder is not writable\n"


def test_ctrl_c_ends_with_a_sentence_and_the_last_checkpoint_stays(capsys, tmp_path):
    command = [sys.executable, "-m", "zerolab", "train", "--stage", "3", "--steps", "100000"]
    command += ["--every", "2", "--checkpoint", str(tmp_path)]
    training = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    heard = training.stderr.readline()  # the second evaluation is on its way
    assert heard.startswith("step 2 of 100,000")
    os.kill(training.pid, signal.SIGINT)
    out, err = training.communicate(timeout=300)
    assert training.returncode == 130
    assert out == ""
    last = err.splitlines()[-1]
    kept = sorted(path for path in tmp_path.iterdir() if path.suffix != ".partial")[-1]
    assert last.startswith("zerolab train: stopped after step ")
    assert last.endswith(f"; {kept} is kept, and --resume goes on from it")
    assert "Traceback" not in err
    steps = int(kept.name.removeprefix("step-")) + 1
    again = [*command[3:], "--resume", "--json", "--steps", str(steps)]
    code, out, err = run(capsys, " ".join(again))
    assert code == 0, err
    assert json.loads(out)["steps"] == steps


def test_a_bar_moves_in_a_terminal_and_only_there(monkeypatch):
    from argparse import Namespace

    from zerolab.commands.train import _Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, expected in (
        (io.StringIO(), ["step 100 of 200, loss 1.250, 7.0% right at step 100"]),
        (Terminal(), [
            "[#####...............] step 50 of 200, loss 1.500 ",
            "[##########..........] step 100 of 200, loss 1.250, 7.0% right at step 100 ",
        ]),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "stderr", stream)
        progress = _Progress(Namespace(steps=200))
        progress.show(50, 1.5, [], None)
        progress.show(100, 1.25, [(100, 1.3, 0.07)], None)
        progress.end_line()
        assert [part for part in stream.getvalue().replace("\n", "\r").split("\r") if part] == (
            expected
        )
