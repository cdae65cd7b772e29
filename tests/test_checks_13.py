"""The checks of lesson 13: solutions with the lecture's and with personal numbers, near misses."""

import contextlib
import itertools
import math

import nbformat
import pytest
import torch
from test_checks_04 import expect, stub

from zerolab import check, given
from zerolab.course.checks import EXERCISES
from zerolab.course.checks.core import Given, Wrong
from zerolab.theory.derivation import Derivation
from zerolab.theory.notation import N_d, Psi

NUMBERS = [f"13.{n}" for n in range(1, 16)]
PERSONAL = [n for n in NUMBERS if EXERCISES[n].choices]
LEARNERS = ["", "ada", "grace", "41-7", "émile", "x" * 200]


@pytest.fixture(scope="module")
def solutions(request):
    """The notebook's own solution cells, run with a learner's numbers: a function by exercise."""
    path = request.config.rootpath / "solutions" / "13_exercises.ipynb"
    cells = nbformat.read(path, 4).cells

    def answer(number, learner=""):
        place = next(i for i, c in enumerate(cells) if c.id == f"ex-{number.replace('.', '-')}")
        own = f"mine_{number.removeprefix('13.')}"
        space = {own: given(number, learner)} if number in PERSONAL else {}
        exec(f"{cells[1].source}\n{cells[place].source}", space)
        name = cells[place + 1].source.split(",")[1].strip(" )")
        return space[name]

    return answer


@pytest.mark.parametrize("number", NUMBERS)
def test_the_empty_stub_fails_and_is_called_not_attempted(number):
    for answer in (stub, None, ...):
        expect(number, answer, 0, "not attempted")


@pytest.mark.parametrize("number", NUMBERS)
def test_the_solution_passes_for_every_learner(number, solutions):
    for learner in LEARNERS if number in PERSONAL else [""]:
        verdict = check(number, solutions(number, learner), learner)
        assert float(verdict) == EXERCISES[number].points, str(verdict)


@pytest.mark.parametrize("number", PERSONAL)
def test_numbers_are_personal_and_stay_the_same(number, solutions):
    drawn = {repr(given(number, f"learner {i}")) for i in range(60)}
    assert len(drawn) > 8
    assert given(number, "ada") == given(number, " ada ")
    others = [f"learner {i}" for i in range(20)]
    of_ada = solutions(number, "ada")()
    passed = [o for o in others if check(number, lambda: of_ada, o) == EXERCISES[number].points]
    # a placement in words, or a whole number of ranks, may be right for two; a number hardly ever
    assert len(passed) < (len(others) if number in ("13.4", "13.6") else 4)


def test_where_grades_are_made_the_notebook_does_not_choose_the_learner(monkeypatch):
    monkeypatch.setenv("ZEROLAB_LEARNER", "ada")
    assert given("13.1", "grace") == given("13.1", "ada") == given("13.1")
    monkeypatch.delenv("ZEROLAB_LEARNER")
    assert given("13.1", "grace") != given("13.1", "ada")


def test_numbers_are_shown_as_python_reads_them():
    assert repr(given("13.3")) == (
        "params = 7e9, ranks = 8, link_bytes_per_s = 400e9, compute_ms = 100"
    )
    assert repr(given("13.7")) == "shown = 104.3"


def test_an_exercise_without_numbers_says_so():
    with pytest.raises(ValueError, match="the same numbers for everybody"):
        given("13.2")


FOUR = {"data parallel": "208 GB", "stage 1": "71.5 GB", "stage 2": "48.75 GB", "stage 3": "26 GB"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stage 1": "48.75 GB"}, "That is stage 2"),
        ({"stage 3": "208 GB"}, "That is data parallel"),
        ({"stage 2": "42.25 GB"}, "fp32 master weights"),
        ({"data parallel": "156 GB"}, "fp32 master weights"),
        ({"stage 1": "572 GB"}, "all ranks together"),
        ({"stage 1": "66.6 GB"}, "GiB written as GB"),
        ({"stage 1": 71.5}, "number of GB"),
        ({"stage 1": "much"}, "not a size"),
    ],
)
def test_13_1_one_wrong_part_costs_its_own_point(change, words):
    expect("13.1", FOUR, 4, "passed")
    expect("13.1", FOUR | change, 3, words)


def test_13_1_needs_all_four():
    expect("13.1", {"stage 1": 1}, 0, "exactly these entries")
    expect("13.1", [1, 2, 3, 4], 0, "a list")


EXACT = (N_d - 1) / N_d
GATHERS = {"all-gather forward": 2 * Psi * EXACT, "all-gather backward": 2 * Psi * EXACT}


def passes(parts, result=6 * Psi * EXACT, bound=6 * Psi):
    derived = Derivation("traffic", parts, "three collectives", unit="bytes")
    derived = derived.then(result, "added") if result is not None else derived
    return derived.at_most(bound, "below 1") if bound is not None else derived


REDUCES = {"reduce-scatter of gradients": 2 * Psi * EXACT}


@pytest.mark.parametrize(
    ("parts", "result", "bound", "points", "words"),
    [
        (GATHERS | {"third all-gather": 2 * Psi * EXACT}, 6 * Psi * EXACT, 6 * Psi, 1,
         "moves the gradients"),
        (GATHERS, 4 * Psi * EXACT, 4 * Psi, 0, "2 parts"),
        (GATHERS | {"reduce-scatter": Psi * EXACT}, None, None, 1, "elements"),
        (GATHERS | {"reduce-scatter": 2 * Psi}, None, None, 1, "to itself"),
        (GATHERS | {"reduce-scatter": 2 * Psi / N_d}, None, None, 1, "own shard alone"),
        (GATHERS | REDUCES, None, None, 2, "sum of the three"),
        (GATHERS | REDUCES, 6 * Psi * EXACT, None, 2, "its bound"),
    ],
)  # fmt: skip
def test_13_2_near_misses_are_named(parts, result, bound, points, words):
    expect("13.2", lambda: passes(parts, result, bound), points, words)


def test_13_2_wants_a_derivation():
    expect("13.2", lambda: passes(GATHERS | REDUCES), 3, "passed")
    expect("13.2", lambda: 6 * Psi, 0, "Return a Derivation")
    expect("13.2", Derivation("x", 3 * 2 * Psi / N_d * N_d, "the lecture"), 0, "Of what?")
    expect("13.2", lambda: passes(GATHERS | REDUCES, 9 * Psi), 0, "not equal to the one before")


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("communication", 105, "(N-1)/N is missing"),
        ("communication", 61.25, "plain data parallelism"),
        ("communication", 45.9375, "counts elements"),
        ("communication", 183.75, "one and a half"),
        ("communication", 0.091875, "seconds"),
        ("communication", 30.625, "three"),
        ("serial", 91.875, "communication alone"),
        ("serial", 100, "perfect overlap"),
        ("serial", 205, "(N-1)/N is missing"),
        ("overlapped", 191.875, "the sum"),
        ("overlapped", 91.875, "longer of the two"),
    ],
)
def test_13_3_near_misses_are_named(part, value, words):
    right = {"communication": 91.875, "serial": 191.875, "overlapped": 100}
    expect("13.3", right, 3, "passed")
    expect("13.3", right | {part: value}, 2, words)


PLACES = {"stage": 3, "parameters": "gpu", "gradients": "cpu", "optimizer states": "nvme"}


@pytest.mark.parametrize(
    ("change", "points", "words"),
    [
        ({"stage": 2}, 0, "350 GB"),
        ({"gradients": "gpu"}, 1, "gpu must take 700 GB"),
        ({"optimizer states": "cpu"}, 1, "too small here"),
        ({"optimizer states": "gpu"}, 1, "move the rest down"),
        ({"parameters": "cpu"}, 3, "gpu has room"),
        ({"parameters": "cpu", "gradients": "gpu"}, 3, "parameters first"),
        ({"gradients": "nvme"}, 3, "cpu has room"),
        ({"gradients": "disk"}, 0, "no tier"),
    ],
)
def test_13_4_near_misses_are_named(change, points, words):
    expect("13.4", PLACES, 4, "passed")
    expect("13.4", PLACES | change, points, words)


BOTH = {"held after backward": "28 GB", "peak of SHARD_GRAD_OP": "42 GB",
        "sent by FULL_SHARD": "31.5 GB", "sent by SHARD_GRAD_OP": "21 GB",
        "better": "SHARD_GRAD_OP"}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"held after backward": "21 GB"}, "as between two steps"),
        ({"held after backward": "38.5 GB"}, "textbook ZeRO-2"),
        ({"peak of SHARD_GRAD_OP": "28 GB"}, "stay gathered"),
        ({"peak of SHARD_GRAD_OP": "56 GB"}, "in 16 bits"),
        ({"sent by FULL_SHARD": "42 GB"}, "nobody sends to himself"),
        ({"sent by FULL_SHARD": "21 GB"}, "for forward and for backward"),
        ({"sent by SHARD_GRAD_OP": "31.5 GB"}, "no second all-gather"),
        ({"sent by SHARD_GRAD_OP": "10.5 GB"}, "one collective"),
        ({"better": "FULL_SHARD"}, "sends a third less"),
        ({"better": "NO_SHARD"}, "none of the two"),
    ],
)
def test_13_5_near_misses_are_named(change, words):
    expect("13.5", BOTH, 5, "passed")
    expect("13.5", BOTH | change, 4, words)


def test_13_4_has_one_right_answer_whatever_is_drawn():
    choices = EXERCISES["13.4"].choices
    for numbers in itertools.product(*choices.values()):
        mine = Given(**dict(zip(choices, numbers, strict=True)))
        passed = []
        for places in itertools.product(("gpu", "cpu", "nvme"), repeat=3):
            with contextlib.suppress(Wrong):
                EXERCISES["13.4"].judge(dict(zip(PLACES, (3, *places), strict=True)), mine)
                passed.append(places)
        assert len(passed) == 1, (mine, passed)


def test_13_5_full_shard_fits_whatever_is_drawn():
    for params, ranks, activations in itertools.product(*EXERCISES["13.5"].choices.values()):
        assert 16 * params / ranks + activations <= 80e9


def test_13_5_where_sharding_the_gradients_alone_does_not_fit_full_shard_is_better():
    learner = next(
        name for name in map(str, range(200))
        if 16 * given("13.5", name).params / given("13.5", name).ranks
        + 2 * given("13.5", name).params + given("13.5", name).activations_bytes > 80e9
    )  # fmt: skip
    mine = given("13.5", learner)
    shards, share = 16 * mine.params / mine.ranks, (mine.ranks - 1) / mine.ranks
    answer = {"held after backward": shards, "peak of SHARD_GRAD_OP": shards + 2 * mine.params,
              "sent by FULL_SHARD": 6 * mine.params * share,
              "sent by SHARD_GRAD_OP": 4 * mine.params * share, "better": "full_shard"}  # fmt: skip
    assert check("13.5", answer, learner) == 5
    assert "more than 80 GB" in str(check("13.5", answer | {"better": "SHARD_GRAD_OP"}, learner))


@pytest.mark.parametrize(
    ("number", "wrong"),
    [
        ("13.6", [(7, "room for everything else"), (13, "round up"), (6, "stage 3"),
                  (14.0001, "rounded up"), ("14 GPUs", "number alone")]),
        ("13.7", [(104.3e9 / 16, "GiB, 2^30"), (104.3 * 2**30, "bytes"),
                  (104.3 * 2**30 / 12, "optimizer states alone"),
                  (104.3 * 2**30 / 2, "parameters alone"), (104.3 / 16, "In billions"),
                  (6.9e9, "rounded too coarsely")]),
        ("13.11", [(520, "(N-1)/N is missing"), (1365, "forward alone"), (227.5, "elements"),
                   (910, "three times"), (303.33, "plain data parallelism"),
                   (3640, "all ranks together"), (1 / 455, "Upside down")]),
    ],
)  # fmt: skip
def test_single_numbers_and_their_near_misses(number, wrong):
    for value, words in wrong:
        expect(number, lambda value=value: value, 0, words)


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        ("13.8", {"stage 2": 204.75e9, "stage 3": 546e9},
         [("stage 2", 234e9, "Times (N-1)/N"), ("stage 2", 45.5e9, "one micro-batch"),
          ("stage 2", 364e9, "once a step"), ("stage 3", 68.25e9, "one micro-batch at stage 3"),
          ("stage 3", 273e9, "elements"), ("stage 3", 386.75e9, "every micro-batch")]),
        ("13.9", {"stage 1": 32e9 / 4.1875, "stage 2": 32e9 / 2.21875, "stage 3": 128e9},
         [("stage 1", 32e9 / 2.21875, "That is stage 2"), ("stage 1", 2e9, "data parallelism"),
          ("stage 1", 32e9 / 4.125, "K is 12"), ("stage 2", 16e9, "limit"),
          ("stage 3", 128, "billions")]),
        ("13.10", {"stage 1": 97.5e9, "stage 2": 52e9},
         [("stage 1", 71.5e9, "16-bit gradients"), ("stage 1", 52e9, "gradients are whole"),
          ("stage 2", 48.75e9, "16-bit gradients"), ("stage 2", 97.5e9, "divides the gradients"),
          ("stage 2", 29.25e9, "stage 3"), ("stage 1", 78e9, "Megatron")]),
        ("13.12", {"seconds": 168, "tokens": 576e3},
         [("seconds", 84, "both ways"), ("seconds", 224, "16Ψ"), ("seconds", 112, "K is 12"),
          ("tokens", 720e3, "four times"), ("tokens", 144e3, "half of the step"),
          ("tokens", 768e3, "recomputation"), ("tokens", 288e3, "both ways")]),
    ],
)  # fmt: skip
def test_dicts_of_numbers_and_their_near_misses(number, right, wrong):
    points = EXERCISES[number].points
    expect(number, right, points, "passed")
    for part, value, words in wrong:
        expect(number, right | {part: value}, points - 1, words)


def norm_of(grad_shard, numel, comm, keep_padding=False):
    mine = grad_shard if keep_padding else grad_shard[: max(0, numel - comm.rank * len(grad_shard))]
    return comm.control_sum(mine.double().square().sum().view(1)).sqrt().item()


def factor(grad_shard, numel, max_norm, comm):
    return min(1.0, max_norm / norm_of(grad_shard, numel, comm))


def local_norm(grad_shard, numel, max_norm, comm):
    return min(1.0, max_norm / grad_shard.double().norm().item())


def with_padding(grad_shard, numel, max_norm, comm):
    return min(1.0, max_norm / norm_of(grad_shard, numel, comm, keep_padding=True))


def never_capped(grad_shard, numel, max_norm, comm):
    return max_norm / norm_of(grad_shard, numel, comm)


def norms_added_up(grad_shard, numel, max_norm, comm):
    mine = grad_shard[: max(0, numel - comm.rank * len(grad_shard))]
    return min(1.0, max_norm / comm.control_sum(mine.double().norm().view(1)).item())


def without_root(grad_shard, numel, max_norm, comm):
    return min(1.0, max_norm / norm_of(grad_shard, numel, comm) ** 2)


def gathers_everything(grad_shard, numel, max_norm, comm):
    full = torch.empty(len(grad_shard) * comm.world_size)
    comm.all_gather(full, grad_shard)
    return min(1.0, max_norm / full[:numel].double().norm().item())


def for_four(grad_shard, numel, max_norm, comm):
    mine = grad_shard[: max(0, numel - comm.rank * -(-numel // 4))]
    return min(1.0, max_norm / comm.control_sum(mine.double().square().sum().view(1)).sqrt().item())


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (local_norm, 0, "each rank has another factor"),
        (lambda *a: norm_of(a[0], a[1], a[3]), 0, "That is the norm"),
        (lambda *a: min(1.0, a[2] * a[3].world_size / norm_of(a[0], a[1], a[3])), 0, "the mean"),
        (
            lambda *a: min(1.0, a[2] * a[3].world_size ** 0.5 / norm_of(a[0], a[1], a[3])),
            0,
            "squares are added up",
        ),
        (norms_added_up, 0, "norms cannot"),
        (with_padding, 0, "no gradient"),
        (never_capped, 0, "never above 1"),
        (without_root, 0, "root is missing"),
        (gathers_everything, 1, "One number of each rank"),
        (for_four, 0, "On three"),
        (lambda *_: None, 0, "Return the factor"),
        (lambda *_: 1.0, 0, "min(1, max_norm / norm)"),
    ],
)
def test_13_13_near_misses_are_named(answer, points, words):
    expect("13.13", answer, points, words)


def test_13_13_passes_as_a_number_or_a_tensor():
    expect("13.13", lambda *a: torch.tensor(factor(*a)), 3, "passed")


def reshard(shards, numel, world_size):
    length = math.ceil(numel / world_size)
    full = torch.zeros(world_size * length)
    full[:numel] = torch.cat(shards)[:numel]
    return [part.clone() for part in full.split(length)]


def keeps_old_padding(shards, numel, world_size):
    length = math.ceil(numel / world_size)
    full = torch.zeros(max(world_size * length, len(torch.cat(shards))))
    full[: len(torch.cat(shards))] = torch.cat(shards)
    return list(full[: world_size * length].split(length))


def balanced(shards, numel, world_size):
    return list(torch.tensor_split(torch.cat(shards)[:numel], world_size))


def reversed_order(shards, numel, world_size):
    return reshard(shards, numel, world_size)[::-1]


def in_place(shards, numel, world_size):
    made = reshard(shards, numel, world_size)
    shards[0].zero_()
    return made


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (balanced, "All shards are equally long"),
        (reversed_order, "place i"),
        (in_place, "only read"),
        (lambda s, n, w: [torch.zeros_like(x) for x in reshard(s, n, w)], "missing or there twice"),
        (lambda s, n, w: torch.cat(s), "a list of tensors"),
        (lambda s, n, w: s, "The lengths are"),
    ],
)
def test_13_14_near_misses_are_named(answer, words):
    expect("13.14", reshard, 3, "passed")
    assert words.lower() in str(expect("13.14", answer, 0)).lower()


def zeros_between(shards, numel, world_size):
    """Pads every old shard instead of the end; right wherever there was no padding."""
    length = math.ceil(numel / world_size)
    row = torch.zeros(world_size * length)
    parts = torch.cat([torch.cat([s, torch.zeros(0)]) for s in shards])
    flat = torch.cat([torch.zeros(1), parts])[: world_size * length]
    row[: len(flat)] = flat
    return list(row.split(length))


def test_13_14_zeros_between_elements_are_named():
    expect("13.14", zeros_between, 0)


def fullest(shapes, ranks, **change):
    sizes = sorted((r * c for r, c in shapes), reverse=True)
    held = [0] * ranks
    for size in sizes:
        held[held.index(min(held))] += size
    right = {
        "flat": math.ceil(sum(sizes) / ranks),
        "rows": sum(math.ceil(r / ranks) * c for r, c in shapes),
        "whole": max(held),
    }
    return right | {name: rule(shapes, ranks) for name, rule in change.items()}


def unsorted(shapes, ranks):
    held = [0] * ranks
    for rows, columns in shapes:
        held[held.index(min(held))] += rows * columns
    return max(held)


@pytest.mark.parametrize(
    ("change", "points", "words"),
    [
        ({"flat": lambda s, n: sum(r * c for r, c in s) // n}, 0, "rounded up once"),
        ({"flat": lambda s, n: sum(math.ceil(r * c / n) for r, c in s)}, 0, "rounded up once"),
        ({"rows": lambda s, n: sum(r // n * c for r, c in s)}, 1, "ceil(rows / N)"),
        ({"rows": lambda s, n: math.ceil(sum(r * c for r, c in s) / n)}, 1, "rank 0 is fullest"),
        ({"whole": unsorted}, 2, "Largest first"),
        ({"whole": lambda s, n: max(r * c for r, c in s)}, 2, "Largest first"),
    ],
)
def test_13_15_near_misses_are_named(change, points, words):
    expect("13.15", lambda s, n: fullest(s, n), 3, "passed")
    expect("13.15", lambda s, n: fullest(s, n, **change), points, words)


def test_13_15_wants_all_three():
    expect("13.15", lambda s, n: 7, 0, "Return a dict")
