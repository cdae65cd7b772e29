"""Lesson 07: stage 3. A linear layer whose weight no rank holds, except while it is needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerolab.course.checks.core import STUB, Wrong, exercise
from zerolab.course.checks.numbers import Slip, expect_bytes, expect_number
from zerolab.course.checks.on_ranks import RANKS, apart, on_four_and_three, on_ranks
from zerolab.practice.comm import Comm, sum_in_rank_order
from zerolab.practice.meter import Meter, label
from zerolab.practice.sharding import flatten, padded_numel, shard_of

SHAPES = ((7, 5), (9, 7), (3, 9))  # three layers, none of which four ranks divide evenly


@exercise(
    "07.1",
    "70 billion parameters on 64 ranks",
    points=1,
    hints=["Everything is divided now.", "16 bytes times 70e9, divided by 64."],
)
def predict(answer: Any) -> None:
    psi = 70e9
    slips = [
        Slip(16 * psi, "That is one rank of plain data parallelism, or all 64 of stage 3."),
        Slip((2 + 14 / 64) * psi, "That is stage 2: the parameters are divided, too."),
        Slip((4 + 12 / 64) * psi, "That is stage 1: gradients and parameters are divided, too."),
        Slip(12 * psi / 64, "That is the optimizer states alone."),
        Slip(2 * psi / 64, "That is the parameters alone: gradients and optimizer states, too."),
        Slip(0.25, "That is bytes for one parameter: there are 70e9 of them."),
        Slip(0.25e9, "A quarter of a byte for each parameter: there are 70e9 of them."),
    ]
    expect_bytes(answer, psi / 4, "Stage 3, 70e9 parameters, 64 ranks", slips)


@exercise(
    "07.2",
    "What one layer needs when it is whole",
    points=1,
    hints=[
        "What of a layer is gathered, all of its states or one kind? How many bytes is that each?",
        "12 · 12288² parameters of 2 bytes.",
    ],
)
def gathered_layer(answer: Any) -> None:
    layer = 12 * 12288**2
    slips = [
        Slip(layer, "That is the number of parameters: each has 2 bytes while it is gathered."),
        Slip(16 * layer, "Only the 16-bit parameters are gathered: optimizer states never travel."),
        Slip(4 * layer, "The working parameters are 16-bit: 2 bytes each."),
        Slip(96 * 2 * layer, "That is the whole model: only one layer is whole at a time."),
        Slip(2 * layer / 1024, "That is a shard: for its forward the layer must be whole."),
    ]
    expect_bytes(answer, 2 * layer, "A whole layer of GPT-3 in 16 bits", slips)


@exercise(
    "07.3",
    "A layer that is there when it is needed",
    points=5,
    hints=[
        (
            "Both functions begin alike: make room for the whole flat weight, gather the shards "
            "into it, cut off the padding, give it its shape."
        ),
        (
            "whole = torch.empty(len(weight_shard) * comm.world_size); "
            "comm.all_gather(whole, weight_shard); weight = whole[:out * in].view(out, in)"
        ),
        (
            "Backward of y = x @ weight.T: the gradient of x is grad_y @ weight, and that of the "
            "weight is grad_y.T @ x, shape (out, in)."
        ),
        (
            "Flatten the gradient, pad it with zeros to the length of all shards, and "
            "reduce-scatter it into a shard. Do not divide by N: the step does."
        ),
    ],
)
def sharded_layer(answer: Any) -> None:
    if not (isinstance(answer, tuple | list) and len(answer) == 2 and all(map(callable, answer))):
        raise Wrong("Two functions are needed.", 'Call check("07.3", (forward, backward)).')
    seed = random.randrange(2**31)  # weights and inputs that nobody can have prepared
    keys = apart(_keys, seed)
    on_four_and_three(lambda size: _judge_layer(answer, seed, keys[size]))


def _judge_layer(answer: Any, seed: int, keys: list[Key]) -> None:
    size = len(keys)
    for rank, seen in enumerate(on_ranks(_trial, *answer, seed, size=size)):
        _same(seen, keys[rank], rank, size)
        if not seen.grads:
            keeps = "A whole weight is still alive after forward, though: keep nothing there."
            raise Wrong(
                "The outputs of forward are right; backward is still the stub.",
                keeps if seen.between > seen.inputs else "",
            )
        shards = sum(shard.nbytes for shard in keys[rank].grads)
        if seen.between > seen.inputs:
            raise Wrong(
                f"All is right, but between forward and backward rank {rank} keeps "
                f"{seen.between - seen.inputs:,} bytes besides the inputs.",
                "A whole weight is still alive: then it need not be gathered again, and this is "
                "not stage 3. Keep nothing in forward; gather once more in backward.",
                points=3,
            )
        if seen.kept > shards:
            raise Wrong(
                f"All is right, but the gradient shards of rank {rank} keep {seen.kept:,} bytes "
                f"alive; they are {shards:,}.",
                "A shard that is a view keeps the whole gradient: give it memory of its own.",
                points=3,
            )
        budget = 3 * (size - 1) * shards
        if seen.sent["total"] > budget:
            raise Wrong(
                f"All is right, but rank {rank} sends {seen.sent['total']:,} bytes where three "
                f"passes, {budget:,}, suffice.",
                "An all-reduce of the gradients, or a gather too many: two all-gathers and one "
                "reduce-scatter are enough.",
                points=3,
            )


@dataclass(frozen=True)
class Seen:
    """What one rank shows after three layers forward and backward, or a stub of it; bytes."""

    output: Any
    grad_x: Any
    grads: list[Any]  # none where backward is the stub
    sent: dict[str, int]
    kept: int
    between: int
    inputs: int


@dataclass(frozen=True)
class Key:
    """What is right on one rank; `local` are its shards of its own gradients, never summed."""

    output: Tensor
    grad_x: Tensor
    grads: list[Tensor]
    local: list[Tensor]


def _weights_and_inputs(ranks: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Three weights (out, in), and each rank's input: (ranks, 4, in)."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
    return weights, torch.randn(ranks, 4, SHAPES[0][1], generator=draw)


def _shard(whole: Tensor, ranks: int, rank: int) -> Tensor:
    flat = flatten([whole], padded_numel(whole.numel(), ranks), torch.float32)
    return shard_of(flat, ranks, rank).clone()


def _keys(seed: int) -> dict[int, list[Key]]:
    """By number of ranks, and rank: what torch makes of whole weights."""
    found = {}
    for n in (RANKS, 3):
        weights, inputs = _weights_and_inputs(n, seed)
        outputs, grads_x, grads = zip(*(_plain(weights, x) for x in inputs), strict=True)
        sums = [sum_in_rank_order(list(parts)) for parts in zip(*grads, strict=True)]
        found[n] = [
            Key(
                output=outputs[rank],
                grad_x=grads_x[rank],
                grads=[_shard(grad, n, rank) for grad in sums],
                local=[_shard(grad, n, rank) for grad in grads[rank]],
            )
            for rank in range(n)
        ]
    return found


def _trial(forward: Callable[..., Any], backward: Callable[..., Any], seed: int) -> Seen:
    """Runs on a rank: three layers through the learner's functions."""
    comm = Comm()
    shards, x = _own(comm, seed)
    kept_inputs: list[Tensor] = []
    grads: list[Any] = []
    with Meter() as meter, torch.no_grad():
        for shard, shape in zip(shards, SHAPES, strict=True):
            kept_inputs.append(x)
            x = forward(x, shard, shape, comm)
        between = meter.held()
        output, grad = x, torch.ones_like(x)
        for layer in reversed(range(len(SHAPES))):
            try:
                back = backward(grad, kept_inputs[layer], shards[layer], SHAPES[layer], comm)
            except NotImplementedError as error:
                if str(error) not in (STUB, ""):
                    raise
                grads.clear()
                break
            if not (isinstance(back, tuple | list) and len(back) == 2):
                raise TypeError("backward must return two tensors: (grad_x, grad_shard)")
            rows, columns = len(grad), SHAPES[layer][1]
            grad, grad_shard = back
            if getattr(grad, "shape", None) != (rows, columns):
                shape = tuple(getattr(grad, "shape", ()))
                raise TypeError(
                    f"backward returned {shape} as grad_x, and x is {(rows, columns)}: return "
                    "(grad_x, grad_shard), in this order"
                )
            grads.insert(0, grad_shard)
        sent = meter.sent_bytes()
    return Seen(
        output=output,
        grad_x=grad,
        grads=grads,
        sent=sent,
        kept=sum(g.untyped_storage().nbytes() for g in grads if isinstance(g, Tensor)),
        between=between["total"] - between["parameters"],
        inputs=sum(t.nbytes for t in kept_inputs) + output.nbytes,
    )


def _own(comm: Comm, seed: int) -> tuple[list[Tensor], Tensor]:
    """This rank's shards and its input; nothing whole outlives the call."""
    weights, inputs = _weights_and_inputs(comm.world_size, seed)
    shards = [_shard(weight, comm.world_size, comm.rank) for weight in weights]
    return [label(shard, "parameters") for shard in shards], inputs[comm.rank].clone()


def _plain(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input, gradients of the weights; the loss is the output's sum."""
    leaves = [weight.clone().requires_grad_() for weight in weights]
    x = x.clone().requires_grad_()
    y = x
    for weight in leaves:
        y = y @ weight.T
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, [weight.grad for weight in leaves if weight.grad is not None]


def _same(seen: Seen, key: Key, rank: int, size: int) -> None:
    checks = [
        ("the output of the third layer", seen.output, key.output, "y = x @ weight.T"),
        ("the gradient of the input", seen.grad_x, key.grad_x, "it is grad_y @ weight"),
    ]
    for what, got, right, why in checks if seen.grads else checks[:1]:
        if type(got) is not Tensor or got.shape != right.shape:
            shape = str(tuple(got.shape)) if type(got) is Tensor else repr(got)
            raise Wrong(f"On rank {rank} {what} is {shape}, not of shape {tuple(right.shape)}.")
        if not torch.allclose(got, right, rtol=1e-4, atol=1e-4):
            raise Wrong(f"On rank {rank} {what} is wrong.", f"With all shards gathered, {why}.")
    for layer, (got, right) in enumerate(zip(seen.grads, key.grads, strict=bool(seen.grads))):
        where = f"On rank {rank} the gradient shard of layer {layer}"
        if type(got) is not Tensor or got.shape != right.shape:
            shape = str(tuple(got.shape)) if type(got) is Tensor else repr(got)
            raise Wrong(
                f"{where} is {shape}; it must have the shard's shape, {tuple(right.shape)}.",
                "A rank keeps the gradient of its own shard alone: reduce-scatter the flat, padded "
                "gradient.",
            )
        if got.dtype != right.dtype:
            raise Wrong(f"{where} is {got.dtype}; the weight is {right.dtype}.")
        if not torch.allclose(got, right, rtol=1e-4, atol=1e-4):
            raise Wrong(f"{where} is wrong.", _why(got, right, key.local[layer], size))


def _why(got: Tensor, right: Tensor, local: Tensor, size: int) -> str:
    if torch.allclose(got, local, rtol=1e-4, atol=1e-4):
        return "It is this rank's own gradient: it was never summed over ranks."
    if torch.allclose(got * size, right, rtol=1e-4, atol=1e-4):
        return "You divided by N: the optimizer's step does that, with its scale."
    rest = right != 0
    if torch.allclose(got[rest], right[rest], rtol=1e-4, atol=1e-4):
        return "The padding must be zero: torch.empty leaves in it what was there before."
    if torch.allclose(got.sort().values, right.sort().values, rtol=1e-4, atol=1e-4):
        return "The numbers are there, in another order: flatten (out, in) row by row."
    return "The weight's gradient is grad_y.T @ x, of shape (out, in), flattened row by row."


@exercise(
    "07.4",
    "Stage 3's traffic over that of data parallelism",
    points=1,
    hints=[
        "Write both in the same unit before you divide.",
        "Stage 3 sends 6Ψ bytes, data parallelism 4Ψ bytes.",
    ],
)
def ratio(answer: Any) -> None:
    slips = [
        Slip(3, "6Ψ bytes over 2Ψ elements: the two are not in the same unit."),
        Slip(6, "6Ψ is what stage 3 sends; divide by what data parallelism sends."),
        Slip(2, "4Ψ over 2Ψ is data parallelism in bytes over itself in elements."),
        Slip(2 / 3, "That is data parallelism over stage 3."),
        Slip(1, "Stages 1 and 2 send as much as data parallelism; stage 3 gathers once more."),
    ]
    expect_number(answer, 1.5, "Stage 3's traffic over that of data parallelism", slips)
