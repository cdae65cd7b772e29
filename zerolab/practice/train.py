"""Trains the small GPT to add, on real ranks at any stage, and goes on where it stopped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.practice import checkpoint, data
from zerolab.practice.adamw import AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT
from zerolab.practice.measure import STAGES
from zerolab.practice.sharding import shard_range

PADDING = -100  # a target that does not count, as for torch's cross_entropy
Batch = tuple[Tensor, Tensor]  # tokens and targets


class TrainingError(ValueError):
    """A step that cannot be taken; raised on all ranks alike, before any weight has changed."""


def train_step(engine: Any, batches: Sequence[Batch], max_norm: float | None = None) -> float:
    """One step on this rank's micro-batches; returns the mean loss over all ranks' tokens.

    Each token counts the same, wherever it is: a micro-batch's mean loss is weighted by its
    share of the tokens, times N because the stages divide by N. With equal counts that is 1/A.
    All ranks call it. What would hang, or spoil the weights, is named first: the ranks tell each
    other their number of micro-batches and tokens before, and who has no finite gradient after.
    """
    comm, model = engine.comm, engine.model
    tokens = [int((targets != PADDING).sum()) for _, targets in batches]
    every = _told(comm, [len(tokens), sum(tokens), min(tokens, default=0)])
    for rank, (number, _, fewest) in enumerate(every):
        if number != every[0][0]:
            raise TrainingError(
                f"Rank {rank} has {number:.0f} micro-batches and rank 0 has {every[0][0]:.0f}: "
                "give all ranks the same number, or those with more wait forever."
            )
        if fewest == 0:
            raise TrainingError(f"Rank {rank} has no micro-batch, or one without a single token.")
    total = sum(of_rank for _, of_rank, _ in every)
    share, bad = 0.0, []
    with _gradients_watched(model, bad):
        for (inputs, targets), count in zip(batches, tokens, strict=True):
            loss = model.loss(inputs, targets)
            engine.backward(loss / (total / (count * comm.world_size)))
            share += loss.item() * count / total
    names = [name for name, _ in model.named_parameters()]
    every = _told(comm, [share, names.index(bad[0]) if bad else -1])
    for rank, (_, place) in enumerate(every):
        if place >= 0:
            for unit in engine.units:
                unit.grad_shard = None
                unit.drop_grads()
            raise TrainingError(
                f"The gradient of {names[int(place)]} on rank {rank} is not finite: no weight was "
                "changed. Look at that rank's data, or train with a lower rate or with clipping."
            )
    engine.step(max_norm)
    return math.fsum(own for own, _ in every)


def _told(comm: Comm, numbers: list[float]) -> list[list[float]]:
    """These numbers of every rank."""
    table = torch.zeros(comm.world_size, len(numbers), dtype=torch.float64)
    table[comm.rank] = torch.tensor(numbers, dtype=torch.float64)
    return comm.control_sum(table.flatten()).view(table.shape).tolist()


@contextlib.contextmanager
def _gradients_watched(model: nn.Module, bad: list[str]) -> Iterator[None]:
    """Collects the names of parameters whose gradient is not finite, the first to come up first."""

    def look(name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if not math.isfinite(grad.sum(dtype=torch.float32)):
                bad.append(name)

        return hook

    hooks = [p.register_hook(look(n)) for n, p in model.named_parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@dataclass(frozen=True)
class Training:
    """What to train and how; a rank's micro-batch is `lines` lines of the corpus.

    The defaults learn to add: on two ranks (128 lines a step) nothing seems to happen for about
    250 steps, at 450 nearly all answers are right.
    """

    stage: int
    recipe: str = "adamw-mixed"
    micro_batches: int = 1
    clip: float | None = None
    seed: int = 0
    lines: int = 64
    options: AdamWOptions = field(default_factory=lambda: AdamWOptions(lr=3e-3, beta2=0.99))


class Trainer:
    """A rank's end of a training: the engine, and where in the corpus it is.

    `curve` has for each evaluation the step, the mean loss since the last one, and the rate of
    right answers.
    """

    def __init__(self, training: Training) -> None:
        self.training, comm = training, Comm()
        torch.manual_seed(training.seed * comm.world_size + comm.rank)
        model = GPT(seed=training.seed)
        self.engine = STAGES[training.stage](model, comm, training.options, training.recipe)
        self.steps, self.next_line, self.losses = 0, 0, []
        self.curve: list[tuple[int, float, float]] = []

    def advance(self, steps: int) -> tuple[int, float]:
        """Takes so many steps; returns how many there were in all, and the last one's loss."""
        training, comm = self.training, self.engine.comm
        ...
