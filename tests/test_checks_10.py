"""The checks of lesson 10: stub, solution, and near misses with their words; 10.2 on real ranks."""

import numpy as np
import pytest
import torch
from test_checks_04 import expect, stub
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from zerolab.course.partition import even_shards, row_shards
from zerolab.practice.peers import fsdp2

NUMBERS = [f"10.{n}" for n in range(1, 7)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("answer", [stub, None])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    expect(number, answer, 0, "not attempted")


class Whatever(float):
    """Equal to everything."""

    __hash__ = float.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


class AnyWord(str):
    """The same for a word, found where the word would be."""

    __hash__ = str.__hash__
    __eq__, __ne__ = Whatever.__eq__, Whatever.__ne__


def rows(d, n):
    each = -(-d // n)
    return [max(0, min(each, d - rank * each)) for rank in range(n)]


def test_10_1_passes():
    expect("10.1", rows, 2, "passed")
    expect("10.1", lambda d, n: torch.tensor(rows(d, n)), 2, "passed")
    expect("10.1", lambda d, n: list(np.array(rows(d, n))), 2, "passed")
    expect("10.1", lambda d, n: tuple(len(c) for c in torch.arange(d).chunk(n))
           + (0,) * (n - len(torch.arange(d).chunk(n))), 2, "passed")  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda d, n: [len(c) for c in torch.arange(d).tensor_split(n)], "fairest deal"),
        (lambda d, n: [-(-d // n)] * n, "padded rows"),
        (lambda d, n: [d // n] * n, "belong to nobody"),
        (lambda d, n: [d // n] * (n - 1) + [d - d // n * (n - 1)], "last rank takes the rest"),
        (lambda d, n: [d / n] * n, "A row is not cut"),
        (lambda d, n: [min(-(-d // n), d - r * -(-d // n)) for r in range(n)], "Less than no rows"),
        (lambda d, n: [count for count in rows(d, n) if count], "is a rank, too"),
        (lambda d, n: rows(d, n)[::-1], "The first ranks get the whole pieces"),
        (lambda d, n: rows(d, 4), "`ranks`"),
        (lambda d, n: [d // n + (rank >= n - d % n) for rank in range(n)], "5 rows on 4 ranks"),
        (lambda d, n: [2, 2, 1, 0], "9 rows on 4 ranks"),
        (lambda d, n: [-(-d // n)] * (n - 1) + [d - -(-d // n) * (n - 1)], "More than is left"),
        (lambda d, n: [round(d / n)] * n, "rounded up, or what is left"),
        (lambda d, n: dict(enumerate(rows(d, n))), "You return a dict"),
        (lambda d, n: list(row_shards(d, n)), "write it yourself"),
        (lambda d, n: list(even_shards(d, n)), "write it yourself"),
        (lambda d, n: [Whatever()] * n, "whole number"),
        (lambda d, n: -(-d // n), "whole number"),
        ([2, 2, 1, 0], "Give the function"),
    ],
)
def test_10_1_near_misses_are_named(answer, words):
    expect("10.1", answer, 0, words)


def sharded(model, mesh, **options):
    for unit in model.units():
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def in_place(model, mesh):
    sharded(model, mesh)


def root_only(model, mesh):
    return fully_shard(model, mesh=mesh)


def root_only_and_freed(model, mesh):
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def blocks(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def kept(model, mesh):
    return sharded(model, mesh, reshard_after_forward=False)


def root_first(model, mesh):
    fully_shard(model, mesh=mesh)
    return sharded(model, mesh)


def no_root(model, mesh):
    for unit in model.units():
        fully_shard(unit, mesh=mesh)
    return model


def nothing(model, mesh):
    return model


def linears(model, mesh):
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    return sharded(model, mesh)


def data_parallel(model, mesh):
    return nn.parallel.DistributedDataParallel(model)


def low_precision(model, mesh):
    return sharded(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def low_precision_sums(model, mesh):
    return sharded(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def low_precision_model(model, mesh):
    return sharded(model.bfloat16(), mesh)


def freed_in_part(model, mesh):
    for unit in model.units():
        fully_shard(unit, mesh=mesh, reshard_after_forward=2)
    return fully_shard(model, mesh=mesh)


def last_dimension(model, mesh):
    return sharded(model, mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def all_in_one_call(model, mesh):
    fully_shard(list(model.units()), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def first_fsdp(model, mesh):
    return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))


def pairs(model, mesh):
    from torch.distributed.device_mesh import init_device_mesh

    return sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))


def two_blocks_in_one(model, mesh):
    fully_shard(list(model.blocks), mesh=mesh)
    return sharded_rest(model, mesh)


def sharded_rest(model, mesh):
    for unit in (model.embedding, model.head):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def a_list(model, mesh):
    sharded(model, mesh)
    return list(model.units())


def not_on_rank_0(model, mesh):
    return sharded(model, mesh) if mesh.get_rank() else model


@pytest.mark.parametrize("answer", [sharded, in_place])
def test_10_2_passes(answer):
    expect("10.2", answer, 4, "passed")


@pytest.mark.parametrize(
    ("answer", "points", "words"),
    [
        (root_only, 1, "only the root was passed"),
        (root_only_and_freed, 1, "only the root was passed"),
        (blocks, 3, "the embedding and the head together"),
        (kept, 2, "SHARD_GRAD_OP's layout"),
        (root_first, 0, "From the inside out"),
        (no_root, 2, "takes itself for a root"),
        (nothing, 0, "Nothing was passed to fully_shard"),
        (linears, 1, "pass whole units"),
        (data_parallel, 0, "this is DDP"),
        (low_precision, 2, "leave mp_policy out"),
        (low_precision_sums, 2, "Gradients travel in another precision"),
        (low_precision_model, 2, "the model as it is"),
        (freed_in_part, 2, "leave reshard_after_forward out"),
        (last_dimension, 0, "an option besides mesh"),
        (all_in_one_call, 1, "or all units in one call"),
        (first_fsdp, 0, "which is FSDP1"),
        (pairs, 2, "hybrid sharding"),
        (two_blocks_in_one, 0, "Pass each of model.units()"),
        (a_list, 0, "return the model"),
        (lambda model, mesh: fsdp2(model, dtype=torch.float32).model, 0, "write it yourself"),
        (not_on_rank_0, 0, "10.2"),
        ([], 0, "no function"),
    ],
)
def test_10_2_near_misses_are_named(answer, points, words):
    expect("10.2", answer, points, words)


def test_10_3_passes_and_each_part_earns_its_point():
    expect("10.3", {"states": "28 GB", "peak": "42 GB"}, 2, "passed")
    expect("10.3", {"states": 28e9, "peak": "28 GB"}, 1, "all units stay whole")
    expect("10.3", {"states": "28 GB"}, 0, "exactly these entries")


@pytest.mark.parametrize(
    ("states", "words"),
    [("38.5 GB", "ZeRO-2"), ("112 GB", "NO_SHARD"), ("42 GB", "That is the peak"),
     ("21 GB", "without gradients"), ("14 GB", "eight ranks")],
)  # fmt: skip
def test_10_3_near_misses_of_the_states(states, words):
    expect("10.3", {"states": states, "peak": "42 GB"}, 1, words)


@pytest.mark.parametrize(
    ("peak", "words"),
    [("38.5 GB", "ZeRO-2"), ("56 GB", "2 bytes each"), ("14 GB", "on top alone"),
     ("49 GB", "stay beside"), ("35 GB", "an earlier micro-batch"), ("31.5 GB", "is a shard")],
)  # fmt: skip
def test_10_3_near_misses_of_the_peak(peak, words):
    expect("10.3", {"states": "28 GB", "peak": peak}, 1, words)


MEMORY = {"outside": "1.10 GiB", "short": "2.10 GiB", "unused": "9.70 GiB"}


def test_10_4_passes():
    expect("10.4", MEMORY, 3, "passed")


@pytest.mark.parametrize(
    ("entry", "answer", "words"),
    [
        ("outside", "9.4 GiB", "reserve, too"),
        ("outside", "69.3 GiB", "allocated bytes are PyTorch's"),
        ("outside", "8.3 GiB", "from the device, unused"),
        ("short", "3.5 GiB", "1.40 GiB of it are free"),
        ("short", "4.9 GiB", "subtract"),
        ("short", "4.8 GiB", "left of the reserve"),
        ("unused", "8.3 GiB", "comes on top"),
        ("unused", "1.4 GiB", "unused as well"),
        ("unused", "6.2 GiB", "Before the request"),
        ("unused", "9.70 GB", "GiB written as GB"),
        ("unused", 9.7, "Write the unit"),
        ("short", 2.1, "Write the unit"),
        ("outside", 1.1, "Write the unit"),
        ("outside", "2.75 GiB", "begin with what is in use"),
        ("unused", "10.8 GiB", "is in use"),
    ],
)
def test_10_4_near_misses_are_named(entry, answer, words):
    expect("10.4", MEMORY | {entry: answer}, 2, words)


def choose(params, ranks, memory, room, unit, whole=2, both=4, states=16, last=None, first=None):
    held = states * params / ranks + room
    if first and held + both * unit <= memory:
        return first
    if held + whole * params <= memory:
        return "SHARD_GRAD_OP"
    return "FULL_SHARD" if held + both * unit <= memory else last


def test_10_5_passes():
    expect("10.5", choose, 3, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, n, m, r, u: choose(p, n, m, 0, u), "room for activations is missing"),
        (lambda p, n, m, r, u: "SHARD_GRAD_OP" if (2 + 14 / n) * p + r <= m
         else choose(p, n, m, r, u, whole=1e9), "not ZeRO-2's"),
        (lambda *a: choose(*a, whole=0), "2Ψ bytes more"),
        (lambda *a: choose(*a, whole=4), "not 4Ψ"),
        (lambda *a: choose(*a, both=0), "two units whole"),
        (lambda *a: choose(*a, both=2), "one at work"),
        (lambda *a: choose(*a, last="FULL_SHARD"), "return None"),
        (lambda p, n, m, r, u: choose(p, n, m - 1, r, u), "fits exactly"),
        (lambda *a: choose(*a, both=8), "two of them 4"),
        (lambda *a: choose(*a, both=6), "not three"),
        (lambda *a: choose(*a, states=12), "an earlier micro-batch"),
        (lambda *a: choose(*a, states=16 * a[1]), "divided by the number of ranks"),
        (lambda *a: choose(*a, whole=2 / a[1]), "not 2Ψ/N"),
        (lambda *a: choose(*a, first="FULL_SHARD"), "where both fit"),
        (lambda p, n, m, r, u: choose(p, n, n * m, r, u), "do not add it up"),
        (lambda p, n, m, r, u: choose(p, 1, n * m, r, u), "added up all ranks"),
        (lambda *a: None, "In some cases one"),
        (lambda *a: "FULL_SHARD", "1.5 times"),
        (lambda *a: "SHARD_GRAD_OP", "does not always fit"),
        (lambda *a: Whatever(), 'There are "SHARD_GRAD_OP"'),
        (lambda *a: choose(*a, states=18), "Add both up"),
        ("FULL_SHARD", "Give the function"),
    ],
)  # fmt: skip
def test_10_5_near_misses_are_named(answer, words):
    expect("10.5", answer, 0, words)


CLAIMS = {
    "states": ("same", 110_400),
    "parameters": ("fp32", 27_600),
    "cut": ("a unit's flat buffer", 25_408),
    "SHARD_GRAD_OP": ("sharded", 82_800),
    "sent": ("1.5", 124_200),
    "precision": ("policy", 250_128),
}


def test_10_6_passes_and_each_claim_earns_its_point():
    expect("10.6", lambda: CLAIMS, 6, "passed")
    wrong = dict.fromkeys(("parameters", "cut", "sent"), ("same", 1))
    expect("10.6", CLAIMS | wrong, 3, "is no choice")
    expect("10.6", dict.fromkeys(CLAIMS, (Whatever(), Whatever())), 0, "is no choice")
    expect("10.6", CLAIMS | {"sent": "1.5"}, 5, "is no pair")
    expect("10.6", CLAIMS | {"sent": (1.5, "124,200 bytes")}, 6, "passed")


@pytest.mark.parametrize(
    ("entry", "pair", "words"),
    [
        ("states", ("less", 110_400), "compare the two rows"),
        ("states", (AnyWord("less"), 110_400), "is no choice"),
        ("states", ("same", 111_168), "FSDP2's"),
        ("states", ("same", 82_800), "without gradients"),
        ("parameters", ("16 bits", 27_600), "the shard is fp32"),
        ("parameters", ("fp32", 13_800), "stage 3's shard"),
        ("cut", ("each parameter", 25_408), "DeepSpeed"),
        ("cut", ("dimension 0", 25_408), "That is FSDP2"),
        ("cut", ("whole layers", 25_408), "Nobody"),
        ("cut", ("a unit's flat buffer", 6_352), "fills the whole buffer"),
        ("cut", ("a unit's flat buffer", 3_392), "embedding"),
        ("SHARD_GRAD_OP", ("whole", 82_800), "would be ZeRO-2"),
        ("SHARD_GRAD_OP", ("sharded", 110_400), "with gradients"),
        ("SHARD_GRAD_OP", ("sharded", 138_000), "stage 2"),
        ("SHARD_GRAD_OP", ("sharded", 96_600), "our stage 3"),
        ("SHARD_GRAD_OP", ("sharded", 165_600), "end of forward"),
        ("sent", ("1.5", 165_582), "DDP in fp32"),
        ("sent", (124_200, "1.5"), 'First the choice, one of "1", "1.5", "3"'),
        ("sent", ("3", 124_200), "bytes by elements"),
        ("sent", ("1", 124_200), "gathers once"),
        ("sent", ("1.5", 82_800), "SHARD_GRAD_OP"),
        ("precision", ("autocast", 250_128), "stay in fp32"),
        ("precision", ("policy", 125_064), "autocast's bytes"),
        ("precision", ("policy", 248_400), "the cell ran FSDP2"),
    ],
)
def test_10_6_near_misses_are_named(entry, pair, words):
    expect("10.6", CLAIMS | {entry: pair}, 5, words)
