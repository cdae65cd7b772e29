"""Trains the small GPT to add: at any stage, here or under a launcher, and on from where it was."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.practice import checkpoint, data
from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.launcher.rank import namespace
from zerolab.practice.measure import STAGES
from zerolab.practice.offload import Offload, Offloaded
from zerolab.practice.precision import LossScale, precision_of
from zerolab.practice.sharding import shard_range
from zerolab.practice.snapshots import CheckpointError
from zerolab.practice.step import StepError, train_step
from zerolab.practice.tiers import on_cpu


@dataclass(frozen=True)
class Training:
    """What to train and how; a step takes `lines` lines of the corpus, whoever shares in them.

    With the defaults the loss comes down to 1.28 in 100 steps, which is that of guessing at the
    sums. Nothing seems to happen for 100 more; by step 400 nearly all answers are right.
    """

    stage: int
    recipe: str = "adamw-mixed"
    micro_batches: int = 1
    max_norm: float | None = 1.0
    seed: int = 0
    lines: int = 128
    model: GPTConfig = field(default_factory=GPTConfig)
    offload: Offload | None = None
    options: AdamWOptions = field(default_factory=lambda: AdamWOptions(lr=2e-3, beta2=0.99))


class Trainer:
    """A rank's end of a training: an engine, how far it is, and how it went.

    `curve` has the step, the mean loss since the last time and the rate of right answers. An fp16
    recipe has a `loss_scale`, the others have None.
    """

    def __init__(self, training: Training, folder: str | None, resume: bool) -> None:
        if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
            torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
        self.training, self.folder, comm = training, folder, Comm()
        torch.manual_seed(training.seed * comm.world_size + comm.rank)
        below = training.offload
        with on_cpu() if below else contextlib.nullcontext():
            model = GPT(training.model, training.seed)
        how = (model, comm, training.options, training.recipe)
        stage = training.stage
        self.engine = Offloaded(stage, *how, below) if below else STAGES[stage](*how)
        self.steps, self.losses = 0, list[float]()
        self.about: dict[str, Any] = {"next_line": 0, "curve": []}
        if resume and folder:
            self.steps, about = checkpoint.load(self.engine, folder)
            self.about |= about  # who saved it may not have been a Trainer
        half = precision_of(training.recipe).working == torch.float16
        self.loss_scale = LossScale(**self.about.get("loss_scale", {})) if half else None

    def advance(self, steps: int, evaluate: bool) -> tuple[int, float, list[Any], LossScale | None]:
        """Takes steps, perhaps evaluates and saves; returns steps, last loss, curve, scale."""
        for _ in range(steps):
            loss = train_step(self.engine, self._batches(), self.training.max_norm, self.loss_scale)
            self.losses.append(loss)
            self.about["next_line"] += self.training.lines
            self.steps += 1
        loss = self.losses[-1] if self.losses else float("nan")
        if evaluate:
            if self.training.offload:
                self.engine.finish()  # a delayed update lands now, not after the next backward
            mean, right = sum(self.losses) / len(self.losses), self.rate_of_right_answers()
            self.about["curve"].append([self.steps, mean, right])
            self.losses.clear()
            if self.loss_scale:
                self.about["loss_scale"] = asdict(self.loss_scale)
            if self.folder:
                checkpoint.save(self.engine, self.folder, self.steps, self.about)
        return self.steps, loss, self.about["curve"], self.loss_scale

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step; where the lines do not divide some have one more."""
        comm, lines, number = self.engine.comm, self.training.lines, self.training.micro_batches
        parts = comm.world_size * number
        cuts = [self.about["next_line"] + lines * part // parts for part in range(parts + 1)]
        own = [micro * comm.world_size + comm.rank for micro in range(number)]
        return [data.batch_from(cuts[i], cuts[i + 1] - cuts[i], 1) for i in own]

    def rate_of_right_answers(self) -> float:
        """Of the sums that were kept for testing; each rank asks the model for its share."""
        comm, model, kept = self.engine.comm, self.engine.model, data.LINES - data.TRAIN_LINES
        start, stop = shard_range(kept, comm.world_size, comm.rank)
        lines = range(data.TRAIN_LINES + start, data.TRAIN_LINES + stop)
        parts = [lines[at : at + 25] for at in range(0, len(lines), 25)]  # few activations at once
        found = sum(right_answers(model, part) for part in parts)
        right = torch.tensor([found], dtype=torch.float64)
        return comm.control_sum(right).item() / kept


@torch.no_grad()
def right_answers(model: nn.Module, lines: range) -> int:
    """How many of these lines the model completes after the "=", each time the likeliest digit."""
    rows = torch.tensor([data.encode(data.line(index)) for index in lines])
    tokens = rows[:, :6]
    model.eval()
    for _ in range(3):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    model.train()
    return int((tokens == rows[:, :9]).all(1).sum())


def on_rank(method: str, *arguments: Any) -> Any:
    """For `World.run`: makes this rank's Trainer, or calls a method of it.

    What all ranks refuse in the same sentence is returned as an error, for the caller to raise.
    """
    try:
        if method == "begin":
            namespace()["trainer"] = Trainer(*arguments)
            return namespace()["trainer"].advance(0, False)
        return getattr(namespace()["trainer"], method)(*arguments)
    except (StepError, CheckpointError) as refusal:
        return refusal
