"""Torch without memory and without other ranks: what dry runs stand on.

Our stages run on torch's meta device, and what matters for bytes is made there as a CPU makes it;
peers run on fake tensors, which know their devices.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def _lacks(what: str) -> str:
    return (
        f"torch {torch.__version__} has no {what} where this command looks for it: use torch "
        "2.13 for dry runs. All else in the course runs."
    )


@contextlib.contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    """A process group of this process alone that says it is `rank` of `ranks`.

    RuntimeError where a group exists already, and where torch has no such thing.
    """
    if dist.is_initialized():
        raise RuntimeError("A dry run makes a process group of its own: start it outside of ranks.")
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise RuntimeError(_lacks("a fake process group")) from None
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> Any:
    """A mode in which tensors have no memory and know their devices; RuntimeError without one."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise RuntimeError(_lacks("tensors without memory")) from None
    return FakeTensorMode(allow_non_fake_inputs=True)


class EqualPieces(TorchFunctionMode):
    """`torch.chunk` of a tensor without memory: its equal pieces are one, and the last is another.

    Nothing lies in them that could tell them apart. fully_shard cuts each parameter into as many
    pieces as there are ranks, and keeps one: that took half of a dry run on a thousand ranks.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function is not torch.chunk or len(args) != 2 or set(given) - {"dim"}:
            return function(*args, **given)
        (whole, chunks), dim = args, given.get("dim", 0)
        length = whole.shape[dim]
        size = -(-length // chunks)
        if length <= 2 * size:
            return function(*args, **given)
        number = -(-length // size)
        last = whole.narrow(dim, (number - 1) * size, length - (number - 1) * size)
        return (*[whole.narrow(dim, 0, size)] * (number - 1), last)


@contextlib.contextmanager
def nowhere() -> Iterator[None]:
    """New tensors lie on the meta device, and attend with the kernel that a CPU has for it.

    Left to itself torch would take attention apart there, and keep what no CPU keeps. First
    weights are not drawn, as there is nothing to draw them into.
    """
    attend = F.scaled_dot_product_attention
    kernel = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if kernel is None:
        raise RuntimeError(_lacks("kernel of a CPU for attention"))

    def attend_as_a_cpu(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool = False
    ) -> Tensor:
        if any(each.stride(-1) != 1 for each in (query, key, value)):  # it takes no such tensor
            return attend(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)
        return kernel(query, key, value, is_causal=is_causal)[0]

    draws = {name: draw for name, draw in vars(nn.init).items() if name[0] != "_" == name[-1]}
    F.scaled_dot_product_attention = attend_as_a_cpu  # type: ignore[assignment]
    vars(nn.init).update(dict.fromkeys(draws, lambda tensor, *_, **__: tensor))
    try:
        with torch.device("meta"), _compiler_unloaded():
            yield
    finally:
        F.scaled_dot_product_attention = attend
        vars(nn.init).update(draws)


@contextlib.contextmanager
def _compiler_unloaded() -> Iterator[None]:
    """Spares the load of torch's compiler, if it is not there yet: that takes longer than a run.

    Many of torch's functions ask it, at their first call, not to compile them, and ask for nothing
    else. Here they are answered without it; whoever asks for more gets the compiler itself.
    """
    name, answered = "torch._dynamo", []
    stand_in = ModuleType(name)

    def disable(function: Any, *_: Any, **__: Any) -> Any:
        answered.append(function)
        return function

    def load(attribute: str) -> Any:
        sys.modules.pop(name, None)
        return getattr(importlib.import_module(name), attribute)

    vars(stand_in).update(disable=disable, __getattr__=load)
    sys.modules.setdefault(name, stand_in)
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        for function in answered:  # asks again in the next call
            vars(function).pop("__dynamo_disable", None)


def _layer_norm(x: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, ...]:
    """Output, mean and deviation: a CPU keeps these two as short as x, other devices do not."""
    rows = (*x.shape[: -len(shape)], *(1 for _ in shape))
    return x.new_empty(x.shape), x.new_empty(rows), x.new_empty(rows)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, mean: Any, deviation: Any, weight: Tensor, bias: Tensor,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    of = zip((x, weight, bias), wanted, strict=True)
    return tuple(each.new_empty(each.shape) if asked else None for each, asked in of)


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


# What these return on a CPU. Torch itself takes them apart on no device, which costs a third of a
# run, and makes LayerNorm's statistics as they are on other devices.
AS_ON_A_CPU: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_layer_norm.default: _layer_norm,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.aten.addmm.default: _addmm,
}
