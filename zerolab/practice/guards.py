"""Mistakes that would show late, or never, are named when they are made, in one sentence each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.practice.comm import Comm


class StepError(ValueError):
    """A step that cannot be taken: raised on all ranks alike, and no weight has changed."""


class GradientOverflow(ArithmeticError):
    """A gradient of some rank is not finite; raised on all ranks alike, before any update."""


def expect_loss(loss: Any) -> None:
    """StepError for what backward cannot begin with."""
    if not isinstance(loss, Tensor):
        raise StepError(f"backward needs the loss as a tensor, not {loss!r}: leave out item().")
    if loss.numel() != 1:
        raise StepError(
            "backward needs a loss that is one number, and this one has the shape "
            f"{list(loss.shape)}: take its mean."
        )
    if not loss.requires_grad:
        raise StepError(
            "The loss depends on no parameter that is trained: leave one unfrozen, and compute "
            "the loss outside of torch.no_grad()."
        )


@contextlib.contextmanager
def one_pass(engine: Any, loss: Tensor) -> Iterator[None]:
    """Around one backward pass of an engine: of a good loss, and whole or not at all.

    A pass that is torn off takes the gradients of all micro-batches with it: what is left of them
    would spoil the next step unseen.
    """
    expect_loss(loss)
    try:
        yield
    except BaseException:
        if reduction := getattr(engine, "reduction", None):
            reduction.next = len(reduction.order)  # nothing more is sent
            with contextlib.suppress(RuntimeError):  # of a connection that is gone
                reduction.finish()  # waits for what is on its way
            reduction.next, reduction.pending = 0, None
        forget_gradients(engine)
        raise


def forget_gradients(engine: Any) -> None:
    """As if no backward pass had been since the last step."""
    for unit in engine.units:
        unit.grad_shard = None
        unit.drop_grads()
        for param in unit.params:
            param.grad = None  # of which autograd was torn away


def expect_unwrapped(model: nn.Module) -> None:
    """ValueError for a model whose parameters another stage has in its units already."""
    if any(getattr(hook, "zerolab_look", False) for hook in model._forward_pre_hooks.values()):
        raise ValueError("This model is in a stage already: make a new one for another stage.")


def told(comm: Comm, numbers: list[float]) -> list[list[float]]:
    """Every rank's numbers, by rank."""
    table = torch.zeros(comm.world_size, len(numbers), dtype=torch.float64)
    table[comm.rank] = torch.tensor(numbers, dtype=torch.float64)
    return comm.control_sum(table.flatten()).view(table.shape).tolist()


def expect_same_weights(modules: Iterable[nn.Module], comm: Comm) -> None:
    """ValueError on all ranks where one's weights, or its modules' order, are not rank 0's."""
    if comm.world_size == 1 or dist.get_backend() == "fake":  # a dry run has no values
        return
    params = [param.detach() for module in modules for param in module.parameters()]
    bits = [param.float().view(torch.int32).sum() for param in params]
    mark = sum(place * int(of_param) for place, of_param in enumerate(bits, 1)) % 2**53
    marks = told(Comm(comm.native), [mark])  # another, that notes what it sends, need not see it
    if others := [rank for rank in range(comm.world_size) if marks[rank] != marks[0]]:
        raise ValueError(
            f"Rank {others[0]}'s weights differ from rank 0's: call torch.manual_seed(0) on every "
            "rank before you make the model, or load the same weights; and let units() return its "
            "modules in the same order everywhere."
        )


def refuse_changes(model: nn.Module, units: Iterable[Any]) -> None:
    """From now on a forward pass begins with a look: is each parameter still its unit's own?

    One that is not in its unit's buffers would keep its value, and not be updated or gathered.
    Weights cannot be loaded any more: master weights would not know of them.
    """
    own = {name: (param, unit) for unit in dict.fromkeys(units)
           for name, param in zip(unit.names, unit.params, strict=True)}  # fmt: skip

    def look(*_: Any) -> None:
        now = dict(model.named_parameters())
        for name in [*now, *own]:
            if change := _change(now.get(name), *own.get(name, (None, None))):
                raise RuntimeError(
                    f"The parameter {name} {change} after the stage had wrapped the model: change "
                    "the model first, and wrap it then."
                )

    look.zerolab_look = True  # type: ignore[attr-defined]
    model.register_forward_pre_hook(look)
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_refuse_loading)


def _refuse_loading(*_: Any) -> None:
    raise RuntimeError(
        "load_state_dict after a stage has wrapped the model would be undone by the next step: "
        "load the weights before you wrap it, or go on from a checkpoint of zerolab's."
    )


def _change(param: nn.Parameter | None, wrapped: nn.Parameter | None, unit: Any) -> str | None:
    if param is None:
        return "was removed"
    if wrapped is None:
        return "was added"
    if param is not wrapped:
        return "was replaced"
    if param.dtype != unit.full_params.dtype:
        return f"was moved to {param.dtype}"
    if param.untyped_storage()._cdata != unit.full_params.untyped_storage()._cdata:
        return "was given other data"
    if param.requires_grad != unit.trainable:
        return "was unfrozen" if param.requires_grad else "was frozen"
    return None
