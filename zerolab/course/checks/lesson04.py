"""Lesson 04: what a rank of plain data parallelism holds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerolab.course.checks.core import Wrong, exercise, type_of
from zerolab.course.checks.numbers import Slip, expect_bytes
from zerolab.course.checks.on_ranks import beside
from zerolab.practice.meter import Meter, young_garbage


@exercise(
    "04.1",
    "Model states of 13 billion parameters",
    points=1,
    hints=[
        "Five things exist for every parameter. List them with their bytes.",
        (
            "Two 16-bit numbers (parameter, gradient) and three 32-bit ones (master weight, "
            "momentum, variance)."
        ),
        "2 + 2 + 4 + 4 + 4 bytes, times 13e9.",
    ],
)
def model_states(answer: Any) -> None:
    psi = 13e9
    slips = [
        Slip(12 * psi, "12 bytes a parameter: that is K alone, or all but the fp32 master copy."),
        Slip(2 * psi, "That is the 16-bit parameters alone: four more pieces exist."),
        Slip(4 * psi, "That is parameters and gradients: AdamW's states are missing."),
        Slip(14 * psi, "That is K = 12 without the gradient, or without the parameter."),
        Slip(8 * psi, "Only 8 bytes a parameter: which of the five pieces did you leave out?"),
        Slip(18 * psi, "That has gradients of 4 bytes: in this recipe they have 2."),
        Slip(20 * psi, "That has a second, fp32 copy of the gradients: this recipe has none."),
        Slip(64 * psi, "That is four ranks together: give one rank's bytes."),
        Slip(16, "That is bytes for one parameter: there are 13e9 of them."),
    ]
    expect_bytes(answer, 16 * psi, "Model states of 13e9 parameters", slips)


@exercise(
    "04.2",
    "Count what is alive",
    points=2,
    hints=[
        "Two views of one tensor do not need twice the memory. What do they share?",
        (
            "tensor.untyped_storage() is the memory behind a tensor; its nbytes() is its size, and "
            "its data_ptr() tells two storages apart."
        ),
        "Collect {storage.data_ptr(): storage.nbytes()} in a dict and add up the values.",
    ],
)
def count_alive(answer: Any) -> None:
    if not callable(answer):
        raise Wrong(f"This is {type_of(answer)}.", "Give the function itself: bytes_alive.")
    whole = torch.zeros(100)
    half = torch.zeros(64, dtype=torch.bfloat16)
    tied = torch.nn.Parameter(torch.zeros(7, 3))
    cases: list[tuple[str, list[Tensor], int, str]] = [
        ("one fp32 tensor of 100 elements", [whole], 400,
         "Bytes are elements times bytes per element: element_size() is 4 for fp32."),
        ("one bf16 tensor of 64 elements", [half], 128,
         "Ask each tensor for its element size: bf16 has 2 bytes, fp32 has 4."),
        ("a tensor and its transposed view", [tied, tied.T], 84,
         "A view has no memory of its own: you counted one storage twice."),
        ("a view of 10 of 100 elements", [whole[:10]], 400,
         "A view keeps all of its storage alive, not only the part that it shows."),
        ("two views of one storage", [whole[:10], whole[50:]], 400,
         "Both views share one storage: tell storages apart, not tensors."),
        ("two tensors of equal values", [torch.zeros(5), torch.zeros(5)], 40,
         "Equal values are not the same memory: compare storages, not contents."),
        ("tensors of 100 fp32 and 64 bf16 elements", [whole, half], 528,
         "Every storage counts with its own size."),
        ("no tensors", [], 0, "Nothing is alive, so the answer is 0."),
    ]  # fmt: skip
    for what, tensors, right, misconception in cases:
        counted = answer(tensors)
        if isinstance(counted, bool) or not hasattr(counted, "__index__"):
            raise Wrong(
                f"For {what} your function returned {type_of(counted)}.",
                "Return the number of bytes as an int.",
            )
        if counted != right:
            raise Wrong(f"For {what} you count {counted} bytes; {right} are alive.", misconception)


PIECES = {
    "parameters": (torch.bfloat16, "the working parameters"),
    "gradients": (torch.bfloat16, "the gradients"),
    "master": (torch.float32, "the master weights"),
    "momentum": (torch.float32, "the momentum"),
    "variance": (torch.float32, "the variance"),
}


@exercise(
    "04.3",
    "Make the sixteen bytes",
    points=3,
    hints=[
        "Five tensors of the same length: which of them start from the weights, which from zero?",
        "torch.zeros_like(weights) is fp32; weights.to(torch.bfloat16) is a 16-bit copy.",
        "Momentum and variance are two tensors: a = b = torch.zeros(...) makes one.",
    ],
)
def make_states(answer: Any) -> None:
    start = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    states, held = beside(made_and_held, answer, start)
    _well_formed(states, start)
    expect_own_memory(states)
    right = 16 * start.numel()
    if held > right:
        raise Wrong(
            f"Your function leaves {held} bytes alive for 1001 parameters; {right} are the states.",
            "Something else is still held, such as a copy that nobody needs any more.",
        )


def made_and_held(make: Callable[..., Any], start: Tensor, *args: Any) -> tuple[Any, int]:
    """What `make(start, *args)` returns, and the bytes that are alive when only that is kept."""
    given = [start.clone()]
    with young_garbage(), Meter() as meter:
        made = make(given.pop(), *args)
        gc.collect()
        held = meter.held()["total"]
    return made, held


def expect_own_memory(pieces: dict[str, Tensor]) -> None:
    """Raises Wrong where two of the tensors lie in the same memory, wholly or in part."""
    seen: dict[int, str] = {}
    for name, piece in pieces.items():
        if piece.untyped_storage().nbytes() < piece.numel() * piece.element_size():
            raise Wrong(
                f"{name} shows a few bytes many times over.",
                "An expanded tensor has no memory for each of its elements: make it with zeros.",
            )
        other = seen.setdefault(piece.untyped_storage().data_ptr(), name)
        if other != name:
            raise Wrong(
                f"{name} and {other} share their memory.",
                "An update of one would change the other, or keep it alive: give each its own.",
            )


def _well_formed(states: Any, start: Tensor) -> None:
    if not isinstance(states, dict) or set(states) != set(PIECES):
        got = f"a dict with {', '.join(map(str, states))}" if isinstance(states, dict) else None
        raise Wrong(
            f"Your function returned {got or type_of(states)}.",
            f"Return a dict with exactly these five tensors: {', '.join(PIECES)}.",
        )
    for name, (dtype, words) in PIECES.items():
        piece = states[name]
        if not isinstance(piece, Tensor) or piece.shape != start.shape:
            shape = tuple(piece.shape) if isinstance(piece, Tensor) else type_of(piece)
            why = "What no step has written yet has its place all the same: zeros."
            raise Wrong(f"{name} is {shape}, not a tensor of shape {tuple(start.shape)}.", why)
        if piece.dtype != dtype:
            raise Wrong(
                f"{name} is {piece.dtype}; this lesson keeps {words} in {dtype}.",
                _why_dtype(name, piece.dtype),
            )
        expected = start if name in ("parameters", "master") else torch.zeros_like(start)
        if not torch.equal(piece.float(), expected.to(dtype).float()):
            raise Wrong(f"{name} does not have its starting values.", _why_values(name))


def _why_dtype(name: str, dtype: torch.dtype) -> str:
    if name in ("parameters", "gradients") and dtype == torch.float16:
        return "fp16 has 2 bytes as well, and bf16 has the range of fp32: the course takes bf16."
    if name in ("parameters", "gradients"):
        return "The forward and backward pass work in 16 bits: that is what makes them cheap."
    if name == "master":
        return "An update is often too small to change a 16-bit weight: the master copy keeps it."
    return "The moments are running averages: in 16 bits small contributions would be lost."


def _why_values(name: str) -> str:
    if name == "master":
        return "The master weights are the fp32 weights themselves, not their 16-bit rounding."
    if name == "parameters":
        return "The working parameters are the weights, rounded to 16 bits."
    return "It starts from zero: no gradient has been seen yet."
