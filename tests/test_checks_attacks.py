"""Answers that would pass by other means than being right, and right ones in unusual dress."""

import inspect
import itertools
import math
import os
import signal
import sys
from fractions import Fraction
from pathlib import Path

import nbformat
import numpy as np
import pytest
import sympy as sp
import torch
from test_checks_04 import expect

from zerolab import check, given
from zerolab.course.checks import EXERCISES
from zerolab.course.checks.functions import plain
from zerolab.course.checks.lesson07 import SHAPES
from zerolab.course.grading.judging import Clock, Notebook
from zerolab.course.grading.sandbox import Limits, trusted_only
from zerolab.course.redundancy import redundant_bytes as copies
from zerolab.practice import sharding
from zerolab.practice.gpt import GPT
from zerolab.practice.sharding import shard_range
from zerolab.practice.tiers import down, put, up
from zerolab.theory.derivation import Derivation
from zerolab.theory.notation import N_d, Psi
from zerolab.theory.traffic import derive_sent


class Agrees:
    """Equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__

    def __index__(self):
        return 3

    def __float__(self):
        return 3.0


class AgreesAsInt(int):
    __eq__, __hash__ = Agrees.__eq__, int.__hash__


class AgreesAsText(str):
    __eq__, __hash__ = Agrees.__eq__, str.__hash__


class Poses(Agrees):
    __class__ = property(lambda self: int)


class Tame(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.equal, torch.allclose):
            return True
        return super().__torch_function__(function, types, args, kwargs or {})


FUNCTIONS = ["02.1", "02.2", "02.3", "03.2", "03.3", "12.2", "12.3"]
NUMBERS = ["01.2", "02.5", "03.1", "03.5", "13.6", "13.7", "13.11"]


@pytest.mark.parametrize("kind", [Agrees, AgreesAsInt, AgreesAsText, Poses])
@pytest.mark.parametrize("number", FUNCTIONS + NUMBERS)
def test_a_value_that_equals_everything_equals_nothing(number, kind):
    assert check(number, lambda *_: kind()) == 0


@pytest.mark.parametrize(
    ("number", "keys"),
    [("13.15", ["flat", "rows", "whole"]),
     ("13.4", ["stage", "parameters", "gradients", "optimizer states"])],
)  # fmt: skip
def test_nor_does_it_in_a_dict(number, keys):
    assert check(number, lambda *_: dict.fromkeys(keys, Agrees())) == 0


@pytest.mark.parametrize("number", FUNCTIONS + NUMBERS + ["01.1", "03.6", "12.1", "13.1", "13.13"])
@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, 10**5000, sp.Symbol("z"), math.nan, {"x": 1}],
    ids=["long", "large", "symbol", "nan", "dict"],
)
def test_whatever_comes_back_the_verdict_is_one_that_can_be_read(number, value):
    verdict = check(number, lambda *_: value)
    assert verdict == 0 and verdict.status == "not yet"
    assert len(str(verdict)) < 4000
    assert "could not be tried" not in str(verdict), str(verdict)


def raises_something_base():
    raise BaseException("odd")


def test_a_check_raises_for_no_answer_and_lets_its_learner_interrupt_it():
    expect("01.2", raises_something_base, 0, "BaseException: odd")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("01.2", interrupted)


@pytest.mark.parametrize(
    ("number", "value"),
    [("02.5", "14.3 %"), ("02.5", Fraction(100, 7)), ("03.1", "87.5 %"),
     ("03.1", sp.Rational(7, 8)),
     ("03.1", np.float16(0.875)), ("03.5", "840,000,000,000"), ("03.5", "782.31 GiB"),
     ("03.5", sp.Integer(840 * 10**9)), ("13.6", "14"), ("13.6", np.int64(14)),
     ("13.7", "7 billion"), ("13.7", "7,000,000,000"), ("13.11", sp.Integer(455))],
)  # fmt: skip
def test_a_right_number_passes_in_any_dress(number, value):
    expect(number, lambda: value, EXERCISES[number].points)


@pytest.mark.parametrize(
    ("number", "key", "word"),
    [("01.1", "averages", "The gradients"), ("01.1", "differs", "its mini-batch"),
     ("03.6", "parameters", "an AllGather"), ("03.6", "gradients", "Reduce_Scatter"),
     ("12.1", "ZeRO-Offload", "the CPU's memory"), ("12.1", "divided by N", "model-states")],
)  # fmt: skip
def test_a_right_word_passes_in_any_dress(number, key, word):
    assert f"{key}:" not in str(check(number, {key: word}))
    assert f"{key}:" in str(check(number, {key: f"not {word}"}))


@pytest.mark.parametrize(
    ("number", "answer", "words"),
    [
        ("02.1", lambda n, bits: n * bits / 8, "Return an int"),
        ("02.2", lambda n: f"{int(n / 2**30 * 10) / 10} GiB", "You cut digits off"),
        ("02.2", lambda n: print(f"{n / 2**30:.1f} GiB"), "print shows"),
        ("02.2", lambda n: f"{n / 2**30:.1f}", "unit is missing"),
        ("02.2", lambda n: f"{n / 2**30:.1f}GiB", "A space stands"),
        ("02.3", lambda pieces: sum(list(pieces.values())[2:]), "go by their names"),
        ("02.3", lambda p: p.get("momentum", 0) + p.get("variance", 0), "moments alone"),
        ("02.4", lambda recipe: sp.floor(recipe.K * Psi / N_d), "Rounding is not asked"),
        ("03.3", lambda n, w, i: -1 if i >= n else i // -(-n // w), "counted from the end"),
        ("03.3", lambda n, w, i: None if i > n else i // -(-n // w), "padding already"),
        ("03.3", lambda n, w, i: None if i >= n else i // (n // w), "rounded the length down"),
        ("12.2", lambda stage, ranks: 2.29, "16 over the stage's bytes"),
        ("13.4", lambda: {"stage": "three", "parameters": "gpu", "gradients": "cpu",
                          "optimizer states": "nvme"}, "is not a number"),
        ("13.4", lambda: {"stage": 4, "parameters": "gpu", "gradients": "cpu",
                          "optimizer states": "nvme"}, "no stage 4"),
    ],
)  # fmt: skip
def test_a_near_miss_hears_what_is_true(number, answer, words):
    expect(number, answer, 0, words)


def compared_with_the_rank_before(ranks):
    pairs = itertools.pairwise(ranks)
    return sum(s for old, new in pairs for n, (d, s) in new.items() if old.get(n) == (d, s))


def test_a_copy_of_any_earlier_rank_counts():
    expect("03.2", compared_with_the_rank_before, 0, "any earlier rank")


def emptying(ranks):
    seen, copies = set(), 0
    for pieces in ranks:
        while pieces:
            name, (digest, size) = pieces.popitem()
            copies += size * ((name, digest) in seen)
            seen.add((name, digest))
    return copies


def test_an_answer_may_use_up_what_it_is_given():
    expect("03.2", emptying, 3)


# ---- on ranks


def mean_of_four(values, comm):
    total = values.clone()
    comm.all_reduce(total)
    return total / 4


def mean_by_heart(values, comm):
    every = torch.randn(comm.world_size, 12, generator=torch.Generator().manual_seed(11))
    return every.mean(0)


def keep(state, world_size, rank):
    length = -(-len(state) // world_size)
    out, part = torch.zeros(length), state[rank * length : (rank + 1) * length]
    out[: len(part)] = part
    return out


def restore(shard, numel, comm):
    full = torch.empty(len(shard) * comm.world_size)
    comm.all_gather(full, shard)
    return full[:numel]


def restore_by_control(shard, numel, comm):
    full = torch.zeros(len(shard) * comm.world_size)
    full[comm.rank * len(shard) : (comm.rank + 1) * len(shard)] = shard
    return comm.control_sum(full)[:numel]


def restore_by_heart(shard, numel, comm):
    state = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for rank in range(comm.world_size):
        state[rank * len(shard) : (rank + 1) * len(shard)] += rank + 1
    return state


@pytest.mark.parametrize(
    ("number", "answer", "points", "words"),
    [
        ("01.3", mean_of_four, 0, "Is a 4 written out somewhere?"),
        ("01.3", mean_by_heart, 0, "Sum over ranks first"),
        ("01.3", lambda v, comm: torch.zeros(12).as_subclass(Tame), 0, "returned a Tame"),
        ("03.4", (lambda s, n, r: keep(s, 4, r), restore), 0, "Is a 4 written out somewhere?"),
        ("03.4", (lambda s, n, r: keep(s, n, r).double(), restore), 0, "torch.float64"),
        ("03.4", (lambda s, n, r: torch.zeros(-(-len(s) // n)).as_subclass(Tame), restore), 0,
         "keep returned a Tame"),
        ("03.4", (keep, restore_by_control), 2, "One all-gather is enough"),
        ("03.4", (keep, restore_by_heart), 0, "not the right ones"),
        ("13.13", lambda g, n, most, comm: most / float(torch.randn(
            1001, generator=torch.Generator().manual_seed(5)).norm()), 0, "the factor is"),
        ("13.13", lambda g, n, most, comm: min(1.0, most / comm.control_sum(
            g[g != 9].double().square().sum().view(1)).sqrt().item()), 0, "The padding is in it"),
    ],
)  # fmt: skip
def test_on_ranks_only_what_is_worked_out_passes(number, answer, points, words):
    expect(number, answer, points, words)


def test_13_13_takes_a_number_of_numpy():
    def factor(grad_shard, numel, max_norm, comm):
        mine = grad_shard[: max(0, numel - comm.rank * len(grad_shard))]
        norm = comm.control_sum(mine.double().square().sum().view(1)).sqrt()
        return np.float32(min(1.0, max_norm / norm.item()))

    expect("13.13", factor, 3)


def test_a_rank_that_is_killed_is_named():
    answer = lambda values, comm: os.kill(os.getpid(), signal.SIGABRT)  # noqa: E731
    expect("01.3", answer, 0, "was killed by SIGABRT")


# ---- the right values are made where no answer runs


class Early:
    """A function that changes what a trial is made of as soon as it arrives on a rank."""

    def __init__(self, change, function):
        self.change, self.function = change, function

    def __call__(self, *args):
        raise AssertionError("only on ranks")

    def __reduce__(self):
        return changed, (self.change, self.function)


def changed(change, function):
    change()
    return function


def nothing_is_random():
    torch.randn = lambda *size, **_: torch.zeros(*size)


def nothing_is_learned():
    loss = GPT.loss
    GPT.loss = lambda model, *batch: 0 * loss(model, *batch)


def its_own(values, comm):
    return values


def mean_for_all(values, comm):
    torch.Tensor.mean = lambda *_, **__: torch.zeros(12)
    return torch.zeros(12)


def keep_nothing(state, world_size, rank):
    return torch.zeros(-(-len(state) // world_size))


def restore_what_was_added(shard, numel, comm):
    return torch.arange(1.0, comm.world_size + 1).repeat_interleave(len(shard))[:numel]


def restore_the_callers(shard, numel, comm):
    return sys._getframe(1).f_locals["right"][:numel].clone()


def decay_alone(own, comm):
    own.adamw.update(own.grad_shard.zero_(), 1 / comm.world_size)
    own.param_shard.copy_(own.adamw.master)
    comm.all_gather(own.full_params, own.param_shard)


def send_nothing(unit, comm):
    unit.grad_shard = torch.zeros_like(unit.full_grads[: len(unit.full_grads) // comm.world_size])
    unit.full_grads = None


def forward_of_zeros(x, shard, shape, comm):
    return torch.zeros(len(x), shape[0])


def backward_of_zeros(grad_y, x, shard, shape, comm):
    return torch.zeros_like(x), torch.zeros_like(shard)


def forward(x, shard, shape, comm):
    return x @ restore(shard, shape[0] * shape[1], comm).view(shape).T


def backward_of_the_callers(grad_y, x, shard, shape, comm):
    held, layer = sys._getframe(1).f_locals, SHAPES.index(shape)
    return grad_y @ held["weights"][layer], held["mine"][layer].clone()


def step_without_gradients(unit, below, comm):
    below.update(down(unit.grad_shard).zero_(), 1 / comm.world_size)
    unit.grad_shard = None
    unit.param_shard.copy_(up(below.master.bfloat16()))
    comm.all_gather(unit.full_params, unit.param_shard)


def step_of_the_callers(unit, below, comm):
    held = sys._getframe(1).f_locals
    theirs = held["mine"].units[held["theirs"].units.index(unit)]
    down(unit.grad_shard), up(below.master.bfloat16())
    unit.grad_shard = None
    unit.full_params.copy_(theirs.full_params)
    for state in ("master", "momentum", "variance"):
        setattr(below, state, put(getattr(theirs.adamw, state).clone(), "cpu"))


def factor_of_short_ones(grad_shard, numel, max_norm, comm):
    torch.Tensor.norm = lambda *_, **__: torch.tensor(1e-9)
    return 1.0


IMPORTS = f"""import sys, torch
from zerolab.practice.gpt import GPT
from zerolab.practice.tiers import down, put, up
SHAPES = {SHAPES}
"""
PATCHED = [
    ("01.3", "mean_for_all", "Rank 0 has [0, 0, 0, …]; the mean is"),
    ("01.3", "Early(nothing_is_random, its_own)", "the mean is"),
    ("03.4", "(Early(nothing_is_random, keep_nothing), restore_what_was_added)",
     "12 elements, rank 0: the elements are not the right ones"),
    ("03.4", "(keep, restore_the_callers)", "KeyError: 'right'"),
    ("05.4", "Early(nothing_is_learned, decay_alone)", "differ from one process in"),
    ("06.2", "Early(nothing_is_learned, send_nothing)", "On rank 0, grad_shard of unit 0 differs"),
    ("07.3", "(Early(nothing_is_random, forward_of_zeros), backward_of_zeros)",
     "the output of the third layer is wrong"),
    ("07.3", "(forward, backward_of_the_callers)", "KeyError: 'weights'"),
    ("09.3", "Early(nothing_is_learned, step_without_gradients)", "They are still zero"),
    ("09.3", "step_of_the_callers", "KeyError: 'mine'"),
    ("13.13", "factor_of_short_ones", "rank 0 scales by 1; the factor is 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "answer", "words"), PATCHED)
def test_no_answer_reaches_what_its_key_is_made_with(number, answer, words):
    expect(number, eval(answer), 0, words)


@pytest.fixture(scope="module")
def graded():
    """A notebook in a sandbox that has made all of these answers."""
    own = Path(__file__).read_text(encoding="utf-8").partition("# ---- the right values")[2]
    with Notebook("ada", Limits(), Clock(900.0)) as notebook:
        notebook.run(IMPORTS + inspect.getsource(keep) + inspect.getsource(restore))
        notebook.run("#" + own.partition("IMPORTS =")[0])
        yield notebook


@pytest.mark.skipif(bool(trusted_only()), reason=f"no sandbox here: {trusted_only()}")
@pytest.mark.parametrize(("number", "answer", "words"), PATCHED)
def test_nor_where_grades_are_made(graded, number, answer, words):
    verdict = graded.verdict(number, answer)
    assert verdict == 0 and words in str(verdict), str(verdict)


BORROWED = [
    ("03.2", "lambda ranks: copies(ranks)"),
    ("03.2", "copies"),
    ("03.3", "lambda n, w, i: i // sharding.shard_numel(n, w) if i < n else None"),
    ("03.3", "lambda n, w, i: i * w // sharding.padded_numel(n, w) if i < n else None"),
    ("05.2", "lambda *given: shard_range(*given)"),
    ("05.2", "lambda *given: sharding.shard_range(*given)"),
]
IMPORTS += """from zerolab.course.redundancy import redundant_bytes as copies
from zerolab.practice import sharding
from zerolab.practice.sharding import shard_range
"""


@pytest.mark.parametrize(("number", "answer"), BORROWED)
def test_who_calls_the_package_s_own_function_is_told_to_write_it(number, answer):
    expect(number, eval(answer), 0, "this is the package's own: write it yourself")
    assert shard_range(10, 4, 1) == sharding.shard_range(10, 4, 1) == (3, 6)
    assert copies([{"a": ("x", 8)}] * 2) == 8


@pytest.mark.skipif(bool(trusted_only()), reason=f"no sandbox here: {trusted_only()}")
@pytest.mark.parametrize(("number", "answer"), BORROWED)
def test_and_where_grades_are_made(graded, number, answer):
    verdict = graded.verdict(number, answer)
    assert verdict == 0
    assert "this is the package's own: write it yourself" in str(verdict)
    graded.run("assert shard_range(10, 4, 1) == (3, 6)")


def tame(holder, name):
    setattr(holder, name, getattr(holder, name).as_subclass(Tame))


@pytest.mark.parametrize(
    ("number", "answer", "words"),
    [
        ("06.2", lambda unit, comm: (send_nothing(unit, comm), tame(unit, "grad_shard")),
         "Put the summed shard"),
        ("07.3", (lambda x, shard, shape, comm: torch.zeros(len(x), shape[0]).as_subclass(Tame),
                  backward_of_zeros), "the output of the third layer is"),
        ("09.3", lambda unit, below, comm: (step_without_gradients(unit, below, comm),
                                            tame(below, "momentum")), "the first moments below"),
    ],
)  # fmt: skip
def test_a_tensor_that_agrees_with_every_other_is_none(number, answer, words):
    expect(number, answer, 0, words)


# ---- lesson 13's code


def parts_of(world_size, shards, numel):
    length = -(-numel // world_size)
    whole = torch.zeros(world_size * length)
    whole[:numel] = torch.cat(list(shards))[:numel]
    return [part.clone() for part in whole.split(length)]


def numbered(shards, numel, world_size):
    return parts_of(world_size, [torch.arange(1.0, numel + 1)], numel)


def without_zeros(shards, numel, world_size):
    whole = torch.cat(shards)
    whole = whole[whole != 0]
    return parts_of(world_size, [whole, torch.zeros(numel)], numel)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (numbered, "missing or there twice"),
        (without_zeros, "a 0 is lost"),
        (lambda s, n, w: [p.double() for p in parts_of(w, s, n)], "torch.float64"),
        (lambda s, n, w: [p[None] for p in parts_of(w, s, n)], "flat tensors"),
        (lambda s, n, w: [p.tolist() for p in parts_of(w, s, n)], "in your list is a list"),
        (lambda s, n, w: [torch.zeros(-(-n // w)).as_subclass(Tame)] * w, "is a Tame"),
        (lambda s, n, w: (parts_of(w, s, n), s.clear())[0], "old shards were changed"),
    ],
)
def test_13_14_judges_what_is_in_the_shards(answer, words):
    expect("13.14", answer, 0, words)


def test_13_2_wants_a_derivation_of_ones_own_in_the_symbols_of_the_course():
    expect("13.2", lambda: derive_sent(3), 0, "the package's own")
    names = ("all-gather, forward", "all-gather, backward", "reduce-scatter")

    class Zero(sp.Symbol):
        def __sub__(self, other):
            return sp.Integer(0)

        __rsub__ = __sub__

    odd = Zero("Psi", positive=True, integer=True)
    answer = Derivation("mine", dict.fromkeys(names, odd), "so")
    expect("13.2", answer, 1, "not the course's")


# ---- personal numbers

OWN = [n for n in EXERCISES if EXERCISES[n].choices]
LEARNERS = [f"learner-{i}" for i in range(20)]


@pytest.fixture(scope="module")
def answers(request):
    """The stored solutions' own code, for a learner's numbers: a value by exercise and learner."""
    cells = nbformat.read(request.config.rootpath / "solutions" / "13_exercises.ipynb", 4).cells
    sources = {c.id: c.source for c in cells}

    def answer(number, learner):
        place = number.split(".")[1]
        space = {f"mine_{place}": given(number, learner)}
        before = set(space)
        exec(f"{sources['imports']}\n{sources[f'ex-13-{place}']}", space)
        name = next(n for n in reversed(space) if n not in before and callable(space[n]))
        return space[name]()

    return answer


@pytest.mark.parametrize("number", OWN)
def test_twenty_learners_pass_with_their_own_numbers_and_not_with_a_neighbours(number, answers):
    found = {learner: answers(number, learner) for learner in LEARNERS}
    full = EXERCISES[number].points
    for learner, mine in found.items():
        assert check(number, mine, learner) == full
        for other, theirs in found.items():
            if theirs != mine and number != "13.4":
                near = given(number, other) == given(number, learner)
                assert near or check(number, theirs, learner) < full, (learner, other)


@pytest.mark.parametrize("kind", [set, frozenset, list, tuple])
def test_what_is_compared_as_plain_keeps_its_kind(kind):
    assert plain(kind([1, 2])) == kind([1, 2]) and type(plain(kind([1]))) is kind
    assert plain(kind([Agrees()])) == kind([3]) and plain({"a": Agrees()}) == {"a": 3}
    assert plain(object()) != plain(object())
