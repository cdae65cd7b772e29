"""Near misses of a pretended class: bodies of answers and the points that they are worth.

The points are stated here, and a test holds each against the judge.
"""

from __future__ import annotations

ALL_REDUCED = """comm.all_reduce(own.full_grads)
own.adamw.update(own.grad_shard, scale=1 / comm.world_size)
own.param_shard.copy_(own.adamw.master)
comm.all_gather(own.full_params, own.param_shard)"""
SUMMED = """comm.reduce_scatter(own.grad_shard, own.full_grads)
own.adamw.update(own.grad_shard, scale=1)
own.param_shard.copy_(own.adamw.master)
comm.all_gather(own.full_params, own.param_shard)"""
ALL_REDUCED_UNIT = """comm.all_reduce(unit.full_grads)
length = len(unit.full_grads) // comm.world_size
shard = unit.full_grads[comm.rank * length : (comm.rank + 1) * length].clone()
unit.full_grads = None
unit.grad_shard = shard if unit.grad_shard is None else unit.grad_shard + shard"""
NEVER_FREED = """length = len(unit.full_grads) // comm.world_size
shard = torch.empty(length, dtype=unit.full_grads.dtype)
comm.reduce_scatter(shard, unit.full_grads)
unit.kept = unit.full_grads
unit.full_grads = None
unit.grad_shard = shard if unit.grad_shard is None else unit.grad_shard + shard"""
VIEW = """master = shard_of(weights, world_size, rank)
return master, torch.zeros_like(master), torch.zeros_like(master)"""
EVERYTHING = "return weights, torch.zeros_like(weights), torch.zeros_like(weights)"
ROUNDED_DOWN = """length = numel // world_size
return rank * length, (rank + 1) * length"""
PADDING_OWNED = """length = -(-numel // world_size)
return rank * length, (rank + 1) * length"""

NEAR_MISSES: dict[str, list[tuple[str, float]]] = {
    "04.1": [('return "52 GB"', 0), ('return "193.7 GB"', 0), ('return "156 GB"', 0)],
    "04.2": [("return sum(t.numel() * t.element_size() for t in tensors)", 0)],
    "05.1": [("return 5.5", 0), ("return 16", 0), ("return 4", 0)],
    "05.2": [(ROUNDED_DOWN, 0), (PADDING_OWNED, 0)],
    "05.3": [(VIEW, 0), (EVERYTHING, 0)],
    "05.4": [(ALL_REDUCED, 2), (SUMMED, 0)],
    "05.5": [('return "66.6 GB"', 0), ('return "26 GB"', 0), ('return "208 GB"', 0)],
    "06.1": [("return 7", 0), ("return 3.75", 0)],
    "06.2": [(ALL_REDUCED_UNIT, 2), (NEVER_FREED, 2)],
    "06.3": [('return "28 GB"', 0), ('return "35 GB"', 0)],
    "06.4": [('return "71.5 GB"', 0)],
    "07.1": [('return "1120 GB"', 0)],
    "07.2": [("return 12 * 12288**2", 0)],
    "07.4": [("return 3", 0), ("return 6", 0)],
    "08.1": [('return "80 MB"', 0), ('return "120 MB"', 0)],
    "08.5": [("return 1e6", 0)],
    "08.7": [("return 6000", 0)],
    "08.9": [('return "100 GB/s"', 0)],
    "09.1": [("return 5.5", 0), ("return 2", 0)],
    "09.4": [("return 0.257e-9 * 150e12 / 6", 0)],
    "11.6": [("return 2", 0), ("return 3", 0)],
}
STUCK = 'raise ValueError("I am stuck here")'
