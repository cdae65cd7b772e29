"""Mistakes that were made in public, on real ranks; those that are arithmetic are oracles."""

import pytest
import torch
from torch import nn

from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.measure import STAGES

# ---- clipping (PyTorch 72548, fairscale 167): the largest local norm, or their sum, is not global


def clipped(max_norm):
    """What gradients are multiplied with where the ranks' shards of the mean have norms 3 and 4."""
    from zerolab.practice.comm import Comm
    from zerolab.practice.norm import clip_scale

    comm = Comm()
    shards = [torch.tensor([6.0, 0.0]), torch.tensor([0.0, 8.0])]  # sums over two ranks
    return clip_scale(comm, [shards[comm.rank]], max_norm, None) * comm.world_size


def test_local_norms_of_3_and_4_are_a_global_norm_of_5(world_of):
    assert world_of(2).run(clipped, 1.0) == [pytest.approx(1 / 5)] * 2  # 1/4 by max, 1/7 by sum
    assert world_of(2).run(clipped, 5.1) == [1.0] * 2  # by sum it would be clipped
    assert world_of(2).run(clipped, 4.5) == [pytest.approx(4.5 / 5)] * 2  # by max it would not


# ---- partitions (DeepSpeed 8297, 129): a parameter without elements, fewer elements than ranks


class Sizes(nn.Module):
    """Parameters of given sizes, each with the gradient 1 + its value."""

    def __init__(self, *sizes):
        super().__init__()
        self.all = nn.ParameterList(torch.linspace(0, 1, size) for size in sizes)

    def units(self):
        return [self]

    def forward(self):
        return sum((p + p * p / 2).sum() for p in self.all)

    loss = forward


def shards_and_weights(stage, sizes):
    """Elements of this rank's shard, and all weights after two steps."""
    from zerolab.practice.comm import Comm

    comm = Comm()
    engine = STAGES[stage](Sizes(*sizes), comm, recipe="adamw-fp32")
    for _ in range(2):
        engine.backward(engine.model())
        engine.step()
    (unit,) = engine.units
    weights = unit.whole(unit.adamw.master, comm)
    return unit.param_shard.numel(), torch.cat([w.flatten() for w in weights.values()]).tolist()


@pytest.mark.parametrize(("sizes", "ranks", "each"), [((8, 0, 24), 2, 16), ((2,), 4, 1)])
def test_empty_parameters_and_empty_shards_take_part_in_every_collective(
    world_of, sizes, ranks, each
):
    plain = world_of(ranks).run(shards_and_weights, 0, sizes)
    sharded = world_of(ranks).run(shards_and_weights, 3, sizes)
    assert [numel for numel, _ in sharded] == [each] * ranks
    assert [weights for _, weights in sharded] == [weights for _, weights in plain]


# ---- counting (DeepSpeed 4064): under stage 3 a parameter without memory still has its elements


def counted_under_stage_3():
    from zerolab.practice.comm import Comm

    model = GPT()
    before = num_parameters(model)
    engine = STAGES[3](model, Comm())
    lies_here = sum(unit.full_params.untyped_storage().nbytes() for unit in engine.units)
    return before, num_parameters(model), lies_here


def test_parameters_of_stage_3_are_counted_though_none_lies_here(world_of):
    for before, after, lies_here in world_of(2).run(counted_under_stage_3):
        assert before == after and lies_here == 0


# ---- experts (DeepSpeed 5008): what one rank does not use, it must reduce all the same


class Experts(nn.Module):
    """Of two layers each rank uses the one of its number; `apart` makes a unit of each."""

    def __init__(self, apart):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.both = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.apart = apart

    def units(self):
        return list(self.both) if self.apart else [self]

    def forward(self, expert):
        return self.both[expert](torch.ones(3)).square().sum()


def weights_of_experts(stage, apart):
    from zerolab.practice.comm import Comm

    comm = Comm()
    engine = STAGES[stage](Experts(apart), comm, recipe="adamw-fp32")
    for _ in range(2):
        engine.backward(engine.model(comm.rank))
        engine.step()
    return [
        value.tolist()
        for unit in engine.units
        for value in unit.whole(unit.adamw.master, comm).values()
    ]


@pytest.mark.parametrize(("stage", "apart"), [(1, False), (2, True), (2, False), (3, False)])
def test_a_rank_reduces_the_experts_that_it_did_not_use(world_of, stage, apart):
    found = world_of(2).run(weights_of_experts, stage, apart)
    assert found[0] == found[1] == world_of(2).run(weights_of_experts, 0, False)[0]


# ---- synchronising in the last micro-batch alone (torchtune 2402): ZeRO-1's volume, not its memory


def sent_and_held(micro_batches, at_the_end):
    """Under fully_shard without resharding: what a step sends, and holds before its last backward.

    Both in units of the model in fp32. With `at_the_end` only the last backward synchronises.
    """
    import torch.distributed as dist

    from zerolab.practice import data
    from zerolab.practice.meter import Meter, label
    from zerolab.practice.peers import fsdp2

    rank, size = dist.get_rank(), dist.get_world_size()
    peer = fsdp2(GPT(), reshard=False, dtype=torch.float32)
    model_bytes = 4 * num_parameters(GPT())
    with Meter() as meter:
        for at in range(micro_batches):
            last = at == micro_batches - 1
            if last:
                held = meter.held()["total"]
            peer.model.set_requires_gradient_sync(last or not at_the_end)
            peer.model.set_reshard_after_backward(last or not at_the_end)
            batch = data.batch(at, rank, size)
            peer.backward(label(peer.loss(*batch), "temporary"))
        return meter.sent_bytes()["total"] / model_bytes, held / model_bytes


def test_one_synchronisation_a_step_has_zero_1_s_volume_and_whole_gradients(world_of):
    (once, whole), *_ = world_of(2).run(sent_and_held, 4, True)
    assert once == pytest.approx(2 / 2, rel=0.01)  # gather and reduce-scatter, (N-1)/N each
    assert whole > 1 + 1  # whole parameters and whole gradients, beside the shards
    (each, shards), *_ = world_of(2).run(sent_and_held, 4, False)
    assert each == pytest.approx((4 + 4) / 2, rel=0.01)
    assert shards < 1.1  # half of the parameters, half of the gradients


# ---- tied weights (accelerate 4171): in one group, and counted once


def tied_under_fully_shard():
    import torch.distributed as dist

    from zerolab.practice import data
    from zerolab.practice.peers import fsdp2, local

    peer = fsdp2(GPT(GPTConfig(tied=True)))
    peer(*data.batch(0, dist.get_rank(), dist.get_world_size()))
    model = peer.model
    tied = model.head.out.weight is model.embedding.token.weight
    return tied, sum(local(p).numel() for p in model.parameters())


def test_a_tied_table_stays_tied_and_is_sharded_once_under_fully_shard(world_of):

    found = world_of(2).run(tied_under_fully_shard)
    assert [tied for tied, _ in found] == [True, True]
    assert sum(numel for _, numel in found) == num_parameters(GPT(GPTConfig(tied=True)))
