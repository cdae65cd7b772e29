"""One training step of an engine of any stage: tokens weighted alike, mistakes named first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.practice.guards import GradientOverflow, StepError, forget_gradients, told
from zerolab.practice.precision import LossScale

NO_TARGET = -100  # a target that does not count, as for torch's cross_entropy


def train_step(
    engine: Any,
    batches: Sequence[tuple[Tensor, Tensor]],
    max_norm: float | None = None,
    loss_scale: LossScale | None = None,
) -> float:
    """A step on this rank's micro-batches of tokens and targets; returns the mean loss.

    All ranks call it. Each token counts the same, wherever it is: the mean loss of a micro-batch
    is weighted by its share of all ranks' tokens, times N as the stages divide by N; where the
    counts are equal that is 1/A. StepError for what would hang or spoil the weights: ranks tell
    each other first how many micro-batches and tokens they have, and then which gradient of
    theirs is not finite.

    With a `loss_scale` a step whose gradients overflow, on one rank or in the sum over ranks, is
    skipped on all, with no bit of the engine changed; it is an error at the smallest scale only.
    """
    comm, model = engine.comm, engine.model
    tokens = [int((targets != NO_TARGET).sum()) for _, targets in batches]
    ranks = told(comm, [len(tokens), sum(tokens), min(tokens, default=0)])
    for rank, (number, _, fewest) in enumerate(ranks):
        if number != ranks[0][0]:
            raise StepError(
                f"Rank {rank} has {number:.0f} micro-batches and rank 0 has {ranks[0][0]:.0f}: "
                "give all the same number, or one of them waits for ever."
            )
        if fewest == 0:
            raise StepError(f"Rank {rank} has no micro-batch, or one without a token to predict.")
    total = sum(of_rank for _, of_rank, _ in ranks)
    scale = loss_scale.scale if loss_scale else None
    mean, bad = 0.0, list[str]()
    with _watched(model, bad):
        for (inputs, targets), count in zip(batches, tokens, strict=True):
            loss = model.loss(inputs, targets)
            engine.backward(loss * (count * comm.world_size / total * (scale or 1)))
            mean += loss.item() * count / total
    names = [name for name, _ in model.named_parameters()]
    ranks = told(comm, [mean, names.index(bad[0]) if bad else -1])
    where = [f"The gradient of {names[int(place)]} on rank {rank}"
             for rank, (_, place) in enumerate(ranks) if place >= 0]  # fmt: skip
    try:
        if where:
            raise GradientOverflow
        engine.step(max_norm, scale)
    except GradientOverflow:
        forget_gradients(engine)
        if loss_scale is None or loss_scale.exhausted:
            raise StepError(
                f"{[*where, 'The sum of the gradients over ranks'][0]} is not finite; no weight "
                "was changed. Look at what was trained on, or lower the learning rate."
            ) from None
        loss_scale.update(overflowed=True)
    else:
        if loss_scale:
            loss_scale.update(overflowed=False)
    return math.fsum(part for part, _ in ranks)


@contextlib.contextmanager
def _watched(model: nn.Module, bad: list[str]) -> Iterator[None]:
    """Adds to `bad` the parameters whose gradient is not finite, in the order of backward."""

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
