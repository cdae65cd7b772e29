"""A step told moment by moment is what real ranks do: held and sent bytes, at each collective."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zerolab.course.walk import TOY, Part, Unit, walk
from zerolab.practice.comm import Comm
from zerolab.practice.measure import STAGES
from zerolab.practice.meter import Meter
from zerolab.theory.memory import RECIPES, held_bytes
from zerolab.theory.traffic import sent_bytes

KINDS = ("parameters", "gradients", "optimizer_states", "gathered")
SHAPES = tuple(tuple(size for _, size in unit.parameters) for unit in TOY)
units_of_any_size = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4
).map(lambda sizes: tuple(Unit(f"u{i}", tuple((f"u{i}.{j}", n) for j, n in enumerate(s)))
                          for i, s in enumerate(sizes)))  # fmt: skip


def watched_step(stage, shapes):
    """One step on this rank: (collective, held as it starts, sent in it) in order, then the end."""

    class Piece(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.vectors = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in sizes)

        def forward(self, x):
            return x * sum(vector.sum() for vector in self.vectors)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pieces = nn.ModuleList(Piece(sizes) for sizes in shapes)

        def units(self):
            return list(self.pieces)

        def forward(self, x):
            for piece in self.pieces:
                x = piece(x)
            return x

    class Watched(Comm):
        inside = False

        def noting(self, collective, call):
            if self.inside:
                return call()
            held, before = meter.held(), meter.sent_bytes()["total"]
            self.inside = True
            result = call()
            self.inside = False
            log.append((collective, held, meter.sent_bytes()["total"] - before))
            return result

        def start_reduce_scatter(self, shard, full):
            return self.noting(
                "reduce_scatter", lambda: super(Watched, self).start_reduce_scatter(shard, full)
            )

        def start_all_gather(self, full, shard):
            return self.noting(
                "all_gather", lambda: super(Watched, self).start_all_gather(full, shard)
            )

        def all_reduce(self, full):
            return self.noting("all_reduce", lambda: super(Watched, self).all_reduce(full))

    log = []
    with Meter() as meter:
        engine = STAGES[stage](Model(), Watched())
        at_start = meter.held()
        engine.backward(engine.model(torch.ones(1, dtype=torch.bfloat16)).sum())
        engine.step()
        return [("", at_start, 0), *log, ("", meter.held(), 0)]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", range(4))
def test_ranks_hold_and_send_what_each_moment_says(world_of, stage, ranks):
    w = walk(stage, ranks)
    expected = [("", w.held_bytes(w.moments[0]), 0)]
    for before, now in zip(w.moments, w.moments[1:], strict=False):
        if now.collective:  # while it is under way both what was and what comes is held
            during = type(now)(now.name, before.held | now.held)
            expected.append((now.collective, w.held_bytes(during), now.sent_bytes))
    expected.append(("", w.held_bytes(w.moments[-1]), 0))
    for log in world_of(ranks).run(watched_step, stage, SHAPES):
        counted = [(name, {kind: held[kind] for kind in KINDS}, sent) for name, held, sent in log]
        assert counted == expected


@given(st.integers(0, 3), st.integers(1, 9), units_of_any_size, st.sampled_from(list(RECIPES)))
def test_a_walk_adds_up_to_the_derived_volumes(stage, ranks, units, recipe):
    w = walk(stage, ranks, units, recipe)
    sizes = [unit.numel for unit in w.units]
    total = sum(unit.numel for unit in units)
    sent = sent_bytes(stage, ranks, total, recipe, sizes)
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        assert sum(m.sent_bytes for m in w.moments if m.collective == name) == sent[name]
    held = held_bytes(stage, ranks, total, recipe, sizes)
    for moment in (w.moments[0], w.moments[-1]):
        found = w.held_bytes(moment)
        stays = stage < 2 and moment is w.moments[-1]  # the memory, for the next step's gradients
        assert found["gathered"] == 0
        assert found["gradients"] == (held["gradients"] if stays else 0)
        assert {k: found[k] for k in ("parameters", "optimizer_states")} == {
            k: held[k] for k in ("parameters", "optimizer_states")
        }


@given(st.integers(0, 3), st.integers(1, 9), units_of_any_size)
def test_shards_cover_every_element_once_and_whole_parts_everywhere(stage, ranks, units):
    w = walk(stage, ranks, units)
    everything = list(range(sum(w.padded)))
    for kind in ("parameters", "optimizer_states"):
        parts = frozenset(part for part in w.moments[0].held if part.kind == kind)
        owned = [[i for start, stop in w.elements(parts, rank).get(kind, [])
                  for i in range(start, stop)] for rank in range(ranks)]  # fmt: skip
        if all(part.whole for part in parts):
            assert all(elements == everything for elements in owned)
        else:
            assert sorted(chain(*owned)) == everything
    named = [i for _, start, stop in w.parameters() for i in range(start, stop)]
    assert named == everything


@given(st.integers(0, 3), st.integers(2, 6), units_of_any_size)
def test_the_ranges_that_are_sent_weigh_what_is_sent(stage, ranks, units):
    w = walk(stage, ranks, units)
    for moment in w.moments:
        for rank in range(ranks):
            elements = sum(stop - start for ranges in w.sent(moment, rank).values()
                           for start, stop in ranges)  # fmt: skip
            copies = {"all_gather": ranks - 1, "reduce_scatter": 1}.get(moment.collective, 0)
            if moment.collective == "all_reduce":
                assert elements * 2 * 2 * (ranks - 1) == moment.sent_bytes * ranks
            else:
                assert elements * copies * 2 == moment.sent_bytes


def test_what_is_freed_was_held_before_and_is_not_after():
    for stage in range(4):
        w = walk(stage)
        for before, now in zip(w.moments, w.moments[1:], strict=False):
            assert now.freed == before.held - now.held


def test_at_stage_3_one_unit_at_a_time_is_whole():
    w = walk(3)
    for moment in w.moments:
        assert len([part for part in moment.held if part.kind == "gathered"]) <= 1
    assert Part("gathered", 1, True) in w.moments[3].held


@pytest.mark.parametrize(
    ("stage", "ranks", "sentence"),
    [(4, 4, "Stage 4 is not known"), (3, 0, "ranks must be a whole number of at least 1")],
)
def test_what_cannot_be_walked_is_refused_in_a_sentence(stage, ranks, sentence):
    with pytest.raises(ValueError, match=sentence):
        walk(stage, ranks)
