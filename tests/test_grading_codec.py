"""What a stranger's code returns is read without trust, and reads as what was written."""

from __future__ import annotations

import io
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import sympy as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerolab.course.grading import channel, codec
from zerolab.course.grading.channel import Garbled
from zerolab.theory import derive_sent
from zerolab.theory.memory import RECIPES
from zerolab.theory.notation import N_d, Psi


def crossed(value, known=None):
    """The value after a crossing, JSON and all."""
    writer = codec.Writer(lambda v: 7 if v is crossed else None)
    header = json.loads(json.dumps([writer.write(value), writer.memory()]))
    reader = codec.Reader(writer.blobs, header[1], lambda number, name: (number, name), known)
    return reader.read(header[0])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_cross_unchanged_with_their_types(value):
    got = crossed(value)
    assert got == value
    assert repr(got) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        math.inf, {1, 2, 3}, frozenset("ab"), Fraction(1, 3), 3 + 4j, b"\x00\xff",
        {(1, "a"): [2.5]}, 2**200, torch.float32,
        Psi, 16 * Psi / N_d, sp.Rational(3, 2) * Psi**2, sp.Max(Psi, 3), sp.oo, sp.Float("0.1"),
        sp.Symbol("x"), sp.Symbol("x", positive=True), sp.Piecewise((1, Psi > 3), (0, True)),
    ],
)  # fmt: skip
def test_rarer_values_cross_unchanged(value):
    got = crossed(value)
    assert got == value
    assert type(got) is type(value)


def test_an_expression_stays_as_it_was_written():
    written = sp.Mul(Psi, sp.Pow(Psi, -1, evaluate=False), evaluate=False)
    assert sp.srepr(crossed(written)) == sp.srepr(written)


def test_symbols_with_other_assumptions_stay_apart():
    assert crossed(sp.Symbol("Psi")) != Psi


def test_records_and_derivations_of_the_package_cross():
    recipe = RECIPES["adamw-mixed"]
    assert crossed(recipe) == recipe
    derivation = derive_sent(3)
    assert str(crossed(derivation)) == str(derivation)


def test_numpy_s_numbers_arrive_as_python_s():
    assert crossed(np.float64(1.5)) == 1.5
    assert type(crossed(np.int64(3))) is int
    assert type(crossed(np.bool_(True))) is bool
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert (crossed(array) == array).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_cross_to_the_bit(dtype):
    tensor = (torch.randn(7, 5) * 3).to(dtype)
    got = crossed(tensor)
    assert got.dtype == dtype
    assert torch.equal(got, tensor)


def test_views_share_memory_after_the_crossing_and_equal_tensors_do_not():
    whole = torch.arange(10.0)
    first, view, other = crossed([whole, whole[2:4], whole.clone()])
    assert view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert other.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert view.tolist() == [2.0, 3.0]
    transposed = crossed(whole.view(2, 5).T)
    assert torch.equal(transposed, whole.view(2, 5).T)


def test_an_expanded_tensor_arrives_with_the_little_memory_that_it_has():
    got = crossed(torch.zeros(1).expand(1000))
    assert got.shape == (1000,)
    assert got.untyped_storage().nbytes() == 4


def test_parameters_and_empty_tensors_cross():
    got = crossed({"p": torch.nn.Parameter(torch.ones(3)), "none": torch.empty(0, 4)})
    assert isinstance(got["p"], torch.nn.Parameter)
    assert got["none"].shape == (0, 4)


def test_functions_cross_as_numbers_and_strangers_as_their_names():
    assert crossed(crossed) == (7, "crossed")

    class Stranger:
        def __repr__(self):
            return "odd one"

    got = crossed([Stranger()])[0]
    assert isinstance(got, codec.Odd)
    assert (type(got).__name__, repr(got)) == ("Stranger", "odd one")


def test_values_whose_own_methods_fail_still_cross():
    class Bad(float):
        def __float__(self):
            raise RuntimeError

        def __repr__(self):
            raise RuntimeError

    class Worse:
        __class__ = property(lambda self: 1 / 0)

    assert crossed(Bad(2.0)) == 2.0
    assert type(crossed(Worse())).__name__ == "Worse"


def test_a_value_that_holds_itself_ends_somewhere():
    ring = []
    ring.append(ring)
    got = crossed(ring)
    while isinstance(got, list):
        got = got[0]
    assert isinstance(got, codec.Odd)


def test_what_a_call_writes_into_its_arguments_comes_back():
    mine = torch.zeros(4)
    out = codec.Writer()
    sent = [out.write([mine]), out.memory()]
    theirs = codec.Reader(out.blobs, sent[1], lambda *_: None)
    (argument,) = theirs.read(sent[0])
    before = [codec.storage_bytes(s) for s in theirs.storages]
    argument[1] = 5.0
    back = codec.Writer()
    back.knows(theirs.storages)
    value, memory = back.write(argument[1:3]), back.memory(before)
    got = codec.Reader(back.blobs, memory, lambda *_: None, out.storages).read(value)
    assert mine.tolist() == [0.0, 5.0, 0.0, 0.0]
    assert got.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()


HOSTILE = [
    {"t": "Fraction", "v": "1e9999999999"},
    {"t": "Fraction", "v": "1/0"},
    {"t": "Decimal", "v": "1e999999999"},
    {"t": "data", "c": "zerolab.__main__:main", "v": {}},
    {"t": "nonsense", "v": 1},
    {"v": 1},
    {"t": "list", "v": 3},
    {"t": "tensor", "v": 0, "d": "torch.float32", "o": 0, "z": [10**6], "s": [1], "g": 0, "p": 0},
    {"t": "tensor", "v": 0, "d": "torch.float32", "o": -4, "z": [1], "s": [1], "g": 0, "p": 0},
    {"t": "tensor", "v": 0, "d": "torch.float32", "o": 0, "z": [2], "s": [-1], "g": 0, "p": 0},
    {"t": "tensor", "v": 0, "d": "torch.float32", "o": 0, "z": [10**5] * 3, "s": [0] * 3,
     "g": 0, "p": 0},
    {"t": "tensor", "v": 0, "d": "torch.load", "o": 0, "z": [1], "s": [1], "g": 0, "p": 0},
    {"t": "tensor", "v": 5, "d": "torch.float32", "o": 0, "z": [1], "s": [1], "g": 0, "p": 0},
    {"t": "data", "c": "os:system", "v": {}},
    {"t": "data", "c": "zerolab.practice.world:World", "v": {}},
    {"t": "data", "c": "zerolab.nowhere:X", "v": {}},
    {"t": "data", "c": "zerolab.theory.timeline:Task", "v": {}},
    {"t": "sympy", "v": ["Lambda", ["symbol", "x", {}]]},
    {"t": "sympy", "v": ["symbol"]},
    {"t": "sympy", "v": ["constant", "__import__('os')"]},
    {"t": "array", "v": 0, "d": "O", "z": [1]},
    {"t": "array", "v": 0, "d": "<f8", "z": [9]},
    {"t": "set", "v": [{"t": "list", "v": []}]},
    {"t": "dict", "v": [[{"t": "list", "v": []}, 1]]},
    {"t": "derivation", "v": ["a", "b", "c", []]},
    {"t": "Fraction", "v": "1/0"},
    {"t": "bytes", "v": 9},
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: json.dumps(v)[:60])
def test_a_value_that_is_none_of_ours_is_refused(value):
    reader = codec.Reader([b"\0" * 8], [0], lambda *_: None)
    with pytest.raises(Garbled):
        reader.read(value)


def test_a_tensor_never_grows_its_memory_while_it_is_read():
    reader = codec.Reader([b"\0" * 8], [0], lambda *_: None)
    value = {"t": "tensor", "v": 0, "d": "torch.float32", "o": 10**9, "z": [0], "s": [1],
             "g": False, "p": False}  # fmt: skip
    assert reader.read(value).untyped_storage().nbytes() == 8


def test_depth_has_an_end_on_the_reader_s_side_too():
    value = 1
    for _ in range(500):
        value = {"t": "list", "v": [value]}
    with pytest.raises(Garbled):
        codec.Reader([], [], lambda *_: None).read(value)


def frame(raw, sizes=()):
    return len(raw).to_bytes(8, "little") + raw + b"".join(b"x" * n for n in sizes)


@pytest.mark.parametrize(
    "raw",
    [
        (2**60).to_bytes(8, "little"),
        frame(b"not json"),
        frame(pickle.dumps({"a": 1})),
        frame(b"[1]"),
        frame(b'[1, "ab"]'),
        frame(b"[1, [-1]]"),
        frame(b"[1, [999999999999]]"),
        frame(b"[1, [true]]"),
        frame(b"[" * 100_000),
    ],
    ids=range(9),
)
def test_a_message_that_is_none_of_ours_is_refused(raw):
    with pytest.raises(Garbled):
        channel.receive(io.BytesIO(raw).read)


def test_a_text_that_takes_many_times_its_size_once_it_is_read_is_not_sent(monkeypatch):
    monkeypatch.setattr(channel, "MOST_TEXT", 1000)
    with pytest.raises(ValueError, match="more than"):
        channel.send(io.BytesIO(), [[]] * 1000)
    with pytest.raises(Garbled, match="too large"):
        channel.receive(io.BytesIO((1001).to_bytes(8, "little")).read)


def test_messages_cross_with_their_blobs():
    stream = io.BytesIO()
    channel.send(stream, {"do": "x"}, [b"one", b""])
    stream.seek(0)
    assert channel.receive(stream.read) == ({"do": "x"}, [b"one", b""])
