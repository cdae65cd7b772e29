"""Values as JSON and raw bytes, so that what a stranger's code returns can be read without trust.

A value is a number, text, list, dict, set, tensor, array, sympy expression, `Derivation`, one of
this package's dataclasses, or a function, which crosses as a number that stands for it. Whatever
else there is crosses as its type's name and a short repr: `Odd`. Tensors that share memory share it
after the crossing, too, and what a call writes into its arguments' memory is written back.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from zerolab.course.grading import expressions
from zerolab.course.grading.channel import Garbled

MOST_ELEMENTS = 10**8  # of one tensor, however small the memory that it repeats
DEEPEST = 60  # lists in lists
MOST_DIGITS = 4000  # before or behind a decimal's point


class Odd:
    """Stands for a value that does not cross; its type has the name of the value's own type."""

    shown = ""

    def __repr__(self) -> str:
        return self.shown


# ---- values out


class Writer:
    """Writes values; `number_of` gives a function's number, or None where it may not cross."""

    def __init__(self, number_of: Callable[[Any], int | None] = lambda _: None) -> None:
        self.number_of = number_of
        self.blobs: list[bytes] = []
        self.storages: list[Any] = []  # in the order of their numbers
        self._places: dict[int, int] = {}

    def knows(self, storages: list[Any]) -> None:
        """Numbers the memory that the other side has already: it comes first."""
        for storage in storages:
            self._place(storage)

    def write(self, value: Any, deep: int = 0) -> Any:
        """What stands for the value in JSON."""
        try:
            return self._write(value, deep)
        except (RecursionError, MemoryError):
            raise
        except Exception:  # a value's own methods may do anything
            return _odd(value)

    def _write(self, value: Any, deep: int) -> Any:
        if deep > DEEPEST:
            return _odd(value)
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int):
            number = int.__int__(value)
            return number if number.bit_length() < 10_000 else _odd(value)
        each = deep + 1
        if type(value) in (list, tuple, set, frozenset):
            items = [self.write(item, each) for item in value]
            return {"t": type(value).__name__, "v": items}
        if isinstance(value, dict):
            pairs = [[self.write(k, each), self.write(v, each)] for k, v in value.items()]
            return {"t": "dict", "v": pairs}
        if isinstance(value, complex):
            return {"t": "complex", "v": [value.real, value.imag]}
        if isinstance(value, bytes):
            return {"t": "bytes", "v": self._blob(bytes(value))}
        if isinstance(value, Fraction | Decimal):
            return {"t": type(value).__name__, "v": str(value)}
        if isinstance(value, tuple):  # a named one
            return {"t": "tuple", "v": [self.write(item, each) for item in value]}
        if (number_of := self.number_of(value)) is not None:
            return {"t": "function", "v": number_of, "n": getattr(value, "__name__", "it")}
        return self._rarer(value, each)

    def _rarer(self, value: Any, deep: int) -> Any:
        kind = type(value)
        if kind.__module__.startswith("zerolab."):
            return self._ours(value, deep)
        torch, numpy, sympy = (sys.modules.get(name) for name in ("torch", "numpy", "sympy"))
        if torch and kind in (torch.Tensor, torch.nn.Parameter) and _plain_tensor(value):
            return self._tensor(value, kind is torch.nn.Parameter)
        if torch and kind in (torch.dtype, torch.Size):
            if kind is torch.Size:
                return {"t": "tuple", "v": list(value)}
            return {"t": "dtype", "v": str(value)}
        if numpy and isinstance(value, numpy.generic | numpy.ndarray):
            if isinstance(value, numpy.generic):
                return self.write(value.item(), deep)
            if value.dtype.kind in "biuf" and value.size <= MOST_ELEMENTS:
                blob = self._blob(numpy.ascontiguousarray(value).tobytes())
                return {"t": "array", "v": blob, "d": value.dtype.str, "z": list(value.shape)}
        if sympy and isinstance(value, sympy.Basic):
            return {"t": "sympy", "v": expressions.write(value)}
        return _odd(value)

    def _ours(self, value: Any, deep: int) -> Any:
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if is_dataclass(value):
            held = {f.name: self.write(getattr(value, f.name), deep) for f in fields(value)}
            return {"t": "data", "c": name, "v": held}
        if name == "zerolab.theory.derivation:Derivation":
            steps = [self.write(step, deep) for step in value.steps]
            return {"t": "derivation", "v": [value.title, value.unit, value.of, steps]}
        return _odd(value)

    def _tensor(self, value: Any, parameter: bool) -> Any:
        return {
            "t": "tensor", "v": self._place(value.untyped_storage()), "d": str(value.dtype),
            "o": value.storage_offset(), "z": list(value.shape), "s": list(value.stride()),
            "g": value.requires_grad, "p": parameter,
        }  # fmt: skip

    def _place(self, storage: Any) -> int:
        # An empty storage has no address of its own.
        key = storage.data_ptr() or -id(storage)
        if key not in self._places:
            self._places[key] = len(self.storages)
            self.storages.append(storage)
        return self._places[key]

    def _blob(self, raw: bytes) -> int:
        self.blobs.append(raw)
        return len(self.blobs) - 1

    def memory(self, before: list[bytes] | None = None) -> list[Any]:
        """For each storage its blob, or None where it still holds the bytes that it had before."""
        before, out = before or [], []
        for place, storage in enumerate(self.storages):
            raw = storage_bytes(storage)
            same = place < len(before) and before[place] == raw
            out.append(None if same else self._blob(raw))
        return out


def storage_bytes(storage: Any) -> bytes:
    """A copy of what a tensor's memory holds."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8)
    return bytes(flat.set_(storage, 0, (storage.nbytes(),), (1,)).numpy().tobytes())


def _plain_tensor(value: Any) -> bool:
    import torch

    strided = value.layout == torch.strided and value.device.type == "cpu"
    return bool(strided and not value.is_quantized and value.numel() <= MOST_ELEMENTS)


def _odd(value: Any) -> Any:
    try:
        shown = repr(value)[:200]
    except Exception:
        shown = ""
    return {"t": "odd", "n": str(type(value).__name__)[:80], "r": shown}


# ---- values in


class Reader:
    """Reads what a `Writer` wrote; `function` turns a number into what stands for the function.

    Every read of a message that is not sound raises Garbled.
    """

    def __init__(
        self,
        blobs: list[bytes],
        memory: list[Any],
        function: Callable[[int, str], Any],
        known: list[Any] | None = None,
    ) -> None:
        self.blobs, self.function = blobs, function
        self.storages: list[Any] = list(known or [])
        for place, blob in enumerate(memory):
            raw = None if blob is None else self.blobs[blob]
            if place >= len(self.storages):
                self.storages.append(_storage(raw or b""))
            elif raw is not None:
                _overwrite(self.storages[place], raw)

    def read(self, value: Any) -> Any:
        try:
            return self._read(value, 0)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
            raise Garbled(f"a value that cannot be read: {e}") from None

    def _read(self, value: Any, deep: int) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if deep > 2 * DEEPEST:
            raise ValueError("too deep")
        each = deep + 1
        held: Any = value["v"] if value["t"] != "odd" else None
        match value["t"]:
            case "list" | "tuple" | "set" | "frozenset" as name:
                items = [self._read(item, each) for item in held]
                return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[name](
                    items
                )
            case "dict":
                return {self._read(k, each): self._read(v, each) for k, v in held}
            case "complex":
                return complex(*held)
            case "bytes":
                return self.blobs[held]
            case "Fraction":
                numerator, _, denominator = held.partition("/")  # "1e9999999999" is none
                return Fraction(int(numerator), int(denominator or 1))
            case "Decimal":
                return _decimal(held)
            case "function":
                return self.function(int(held), str(value["n"]))
            case "tensor":
                return self._tensor(value)
            case "dtype":
                return _dtype(held)
            case "array":
                return self._array(value)
            case "sympy":
                return expressions.read(held)
            case "derivation":
                return self._derivation(held, each)
            case "data":
                return self._data(value, each)
            case "odd":
                return type(str(value["n"]), (Odd,), {"shown": str(value["r"])})()
        raise ValueError(f"no kind {value['t']!r}")

    def _tensor(self, value: Any) -> Any:
        import torch

        storage, dtype = self.storages[value["v"]], _dtype(value["d"])
        offset, shape, stride = value["o"], value["z"], value["s"]
        if not all(type(n) is int and n >= 0 for n in (offset, *shape, *stride)):
            raise ValueError("no shape")
        if len(shape) != len(stride) or math.prod(shape) > MOST_ELEMENTS:
            raise ValueError("no shape")
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if 0 not in shape and (last + 1) * dtype.itemsize > storage.nbytes():
            raise ValueError("a tensor beyond its memory")
        if 0 in shape:  # it shows nothing, and set_ must not make the memory grow
            offset = 0
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        if value["p"]:
            return torch.nn.Parameter(tensor, requires_grad=bool(value["g"]))
        return tensor.requires_grad_() if value["g"] else tensor

    def _array(self, value: Any) -> Any:
        import numpy

        dtype = numpy.dtype(str(value["d"]))
        if dtype.kind not in "biuf":
            raise ValueError("no array of numbers")
        return numpy.frombuffer(self.blobs[value["v"]], dtype).reshape(value["z"]).copy()

    def _derivation(self, held: Any, deep: int) -> Any:
        from zerolab.theory.derivation import Derivation, Step

        title, unit, of, steps = held
        derivation = Derivation(str(title), 0, "", unit=str(unit), of=str(of))
        derivation.steps = tuple(self._read(step, deep) for step in steps)
        if not derivation.steps or not all(isinstance(s, Step) for s in derivation.steps):
            raise ValueError("no derivation")
        return derivation

    def _data(self, value: Any, deep: int) -> Any:
        module, _, name = value["c"].partition(":")
        if not module.startswith("zerolab.") or "._" in module:  # __main__ would run
            raise ValueError(f"{module} is none of ours")
        try:
            kind = getattr(importlib.import_module(module), name)
        except ImportError:
            raise ValueError(f"no module {module}") from None
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise ValueError(f"{name} is no record")
        made = object.__new__(kind)
        for field in fields(kind):
            object.__setattr__(made, field.name, self._read(value["v"][field.name], deep))
        return made


def _decimal(text: str) -> Decimal:
    number = Decimal(text)
    if number.is_finite() and abs(number.adjusted()) > MOST_DIGITS:  # as an int it never ends
        raise ValueError("too large")
    return number


def _dtype(name: Any) -> Any:
    import torch

    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name}")
    return dtype


def _storage(raw: bytes) -> Any:
    import torch

    if not raw:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().untyped_storage()


def _overwrite(storage: Any, raw: bytes) -> None:
    import torch

    if len(raw) != storage.nbytes():
        raise Garbled("memory that has changed its size")
    if raw:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (len(raw),), (1,))
        flat.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
