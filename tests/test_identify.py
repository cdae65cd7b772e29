"""A step is named by what it held and sent; impostors are exposed by their bytes."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerolab.cli import main
from zerolab.course.identify import NAMES, identify
from zerolab.practice.adamw import AdamW
from zerolab.practice.comm import Comm
from zerolab.practice.measure import STAGES
from zerolab.practice.meter import label
from zerolab.practice.peers import fsdp2
from zerolab.practice.sharding import shard_of
from zerolab.practice.stage0 import Stage0
from zerolab.practice.stage1 import Stage1
from zerolab.practice.stage2 import Stage2
from zerolab.practice.stage3 import Stage3

FOUR = 4


def expect_name(world_of, make, name, *words):
    found = identify(make, world=world_of(FOUR), timeout=300)
    assert found.name == name, found.as_text()
    told = "\n".join(found.evidence)
    for word in words:
        assert word in told
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_our_stages_are_named(world_of, stage):
    name = f"stage {stage}" if stage else "data parallel"
    assert expect_name(world_of, STAGES[stage], name).evidence == []


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("ddp", "data parallel"),
        ("zero-redundancy", "stage 1 that all-reduces"),
        ("fsdp2", "stage 3"),
        ("fsdp2-fp32", "stage 3"),
        ("fsdp2-no-reshard", "SHARD_GRAD_OP"),
    ],
)
def test_peers_are_named(world_of, peer, name):
    expect_name(world_of, peer, name)


def hybrid(model):
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp2(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def test_hybrid_sharding_is_named(world_of):
    found = expect_name(world_of, hybrid, "hybrid")
    assert set(found.parts.values()) == {2}


@pytest.mark.parametrize("recipe", ["adamw-fp32", "adamw-mixed-fp32-grads"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_named_in_every_recipe(world_of, stage, recipe):
    def make(model, comm):
        return STAGES[stage](model, comm, recipe=recipe)

    expect_name(world_of, make, f"stage {stage}" if stage else "data parallel")


@pytest.mark.parametrize("stage", STAGES)
def test_a_function_of_a_whole_step_is_named_too(world_of, stage):
    def make(model, comm):
        engine = STAGES[stage](model, comm)

        def step(tokens, targets):
            engine.backward(model.loss(tokens, targets))
            engine.step()

        return step

    expect_name(world_of, make, f"stage {stage}" if stage else "data parallel")


def plain_torch(model):
    """Data parallelism as a tutorial writes it."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens, targets):
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()

    return step


def test_plain_torch_that_labels_nothing_is_named(world_of):
    expect_name(world_of, plain_torch, "data parallel")


class KeepsGradients(Stage2):
    """Says that it is stage 2: it reduces early, and keeps what it should free."""

    def __init__(self, model, comm):
        super().__init__(model, comm)
        self.hoard = []
        self.reduction.after_unit = lambda unit: self.hoard.append(unit.grads().clone())

    def step(self, max_norm=None):
        super().step(max_norm)
        self.hoard.clear()


class AllReduces(Stage1):
    """Says that it is stage 1: its gradients are summed on every rank, for 6Ψ bytes a step."""

    @torch.no_grad()
    def step(self, max_norm=None):
        n, rank = self.comm.world_size, self.comm.rank
        for unit in self.units:
            self.comm.all_reduce(unit.grads())
            unit.adamw.update(shard_of(unit.grads(), n, rank), 1 / n)
            unit.param_shard.copy_(unit.adamw.master)
            self.comm.all_gather(unit.full_params, unit.param_shard)
            unit.drop_grads()


class AllReducingComm(Comm):
    """Reduces for one rank what it sends to all."""

    def start_reduce_scatter(self, shard, full):
        dist.all_reduce(full)
        shard.copy_(shard_of(full, self.world_size, self.rank))
        return lambda: None


def all_reduces_early(model, comm):
    """Says that it is stage 2, as DeepSpeed's does: gradients leave early, at twice the cost."""
    return Stage2(model, AllReducingComm())


class KeepsALittleMore(Stage2):
    """Stage 2, but for half a slice of gradients more."""

    def __init__(self, model, comm):
        super().__init__(model, comm)
        self.hoard = []
        self.reduction.after_unit = lambda unit: self.hoard.append(
            unit.grads()[: unit.padded // 8].clone()
        )

    def step(self, max_norm=None):
        super().step(max_norm)
        self.hoard.clear()


class KeepsABuffer(Stage1):
    """Stage 1 beside a buffer that goes by its name."""

    def __init__(self, model, comm):
        super().__init__(model, comm)
        self.buffer = label(torch.zeros(10**6), "temporary")


class CountsItsSteps(Stage1):
    """Stage 1 that sums a number over ranks in every step."""

    def step(self, max_norm=None):
        dist.all_reduce(torch.ones(1))
        super().step(max_norm)


class KeepsAllStates(Stage1):
    """Says that it is stage 1: it updates its slice, and holds the states of all."""

    def __init__(self, model, comm):
        super().__init__(model, comm)
        self.spare = [AdamW(torch.zeros(unit.padded)) for unit in self.units]


class NeverFrees(Stage3):
    """Says that it is stage 3: it gathers before every use, and frees nothing."""

    def __init__(self, model, comm):
        super().__init__(model, comm)
        self.gathering.free = self.gathering.whole.discard
        self.reduction.after_unit = self.gathering.free


class ForgetsToReduce(Stage0):
    """Says that it is data parallel: every rank goes its own way."""

    @torch.no_grad()
    def step(self, max_norm=None):
        for unit in self.units:
            unit.adamw.update(unit.grads(), 1.0)
            unit.param_shard.copy_(unit.adamw.master)
            unit.drop_grads()


class UpdatesItsSliceAlone(Stage1):
    """Says that it is stage 1: nobody hears of the new slices."""

    @torch.no_grad()
    def step(self, max_norm=None):
        for unit in self.units:
            unit.grad_shard = shard_of(unit.grads(), self.comm.world_size, self.comm.rank)
            self.comm.reduce_scatter(unit.grad_shard, unit.grads())
            unit.adamw.update(unit.own_grads(), 1 / self.comm.world_size)
            unit.param_shard.copy_(unit.adamw.master)
            unit.drop_grads()
            unit.grad_shard = None


class ReducesEachTime(Stage0):
    """Data parallel, but for every micro-batch."""

    def backward(self, loss):
        loss.backward()
        with torch.no_grad():
            for unit in self.units:
                self.comm.all_reduce(unit.grads())


def test_a_stage_2_that_keeps_whole_gradients_is_stage_1(world_of):
    found = expect_name(world_of, KeepsGradients, "stage 1", "as at stage 2", "52,168")
    assert found.parts["gradients"] == 1


def test_a_stage_1_that_costs_6_psi_all_reduces(world_of):
    found = expect_name(world_of, AllReduces, "stage 1 that all-reduces", "6Ψ", "469,512")
    assert found.sent_bytes["total"] == 469_512


def test_a_stage_2_that_all_reduces_is_named_so(world_of):
    name = "stage 2 that all-reduces"
    found = expect_name(world_of, all_reduces_early, name, "stage 2 needs 313,008", "469,512")
    assert identify(all_reduces_early, claimed=name, world=world_of(FOUR)).agrees
    assert found.parts["gradients"] == FOUR


def test_a_stage_2_that_keeps_a_little_more_is_told_how_much(world_of):
    found = expect_name(world_of, KeepsALittleMore, "stage 2", "where its slice has 52,168")
    assert found.parts["gradients"] is None


def test_a_buffer_is_no_state_and_no_secret(world_of):
    expect_name(world_of, KeepsABuffer, "stage 1", "buffers have 4,000,000 bytes besides")


def test_one_number_summed_over_ranks_is_no_traffic(world_of):
    plain, found = (identify(each, world=world_of(FOUR)) for each in (Stage1, CountsItsSteps))
    assert found.sent_bytes == plain.sent_bytes
    assert found.name == "stage 1" and found.evidence == []


def test_a_stage_1_that_keeps_all_states_is_none_of_these(world_of):
    expect_name(world_of, KeepsAllStates, "none of these", "optimizer states", "313,008")


def test_a_stage_3_that_frees_nothing_is_none_of_these(world_of):
    expect_name(world_of, NeverFrees, "none of these", "as stage 3 does, but keeps all")


def test_ranks_that_never_reduce_are_none_of_these(world_of):
    expect_name(world_of, ForgetsToReduce, "none of these", "weights differ", "sends nothing")


def test_slices_that_nobody_hears_of_are_none_of_these(world_of):
    expect_name(world_of, UpdatesItsSliceAlone, "none of these", "weights differ")


def test_an_all_reduce_for_every_micro_batch_is_noticed(world_of):
    expect_name(world_of, ReducesEachTime, "data parallel", "once a step is enough")


@pytest.mark.parametrize(
    ("make", "claimed", "words"),
    [
        (KeepsGradients, "stage 2", ["stage 2 holds 52,168 bytes of gradients"]),
        (AllReduces, "stage 1", ["stage 1 sends 313,00", "this sends 469,512"]),
        (Stage1, "stage 3", ["bytes of parameters", "bytes of gradients", "stage 3 sends"]),
    ],
)
def test_a_claim_is_answered_with_the_bytes_that_differ(world_of, make, claimed, words):
    found = identify(make, claimed=claimed, world=world_of(FOUR))
    assert not found.agrees
    told = "\n".join(found.evidence)
    assert all(word in told for word in words), told


def test_what_travels_in_16_bits_is_compared_with_a_stage_that_sends_16_bits(world_of):
    found = identify("fsdp2-no-reshard", claimed="stage 2", world=world_of(FOUR))
    assert [line.split()[:3] for line in found.evidence] == [["stage", "2", "holds"]]
    assert found.sent_bytes["total"] == 157_080 * 2


def test_a_true_claim_is_not_argued_with(world_of):
    found = identify(Stage3, claimed="Stage-3", world=world_of(FOUR))
    assert found.agrees
    assert found.evidence == []


def trains_nothing(model, comm):
    def step(tokens, targets):
        model.loss(tokens, targets).backward()
        model.zero_grad()

    return step


def never_returns(model, comm):
    def step(tokens, targets):
        time.sleep(3600)

    return step


def returns_a_number(model, comm):
    return 5


def wants_three(model, comm, more):
    return None


def fails(model, comm):
    raise KeyError("on purpose")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (trains_nothing, "trains nothing"),
        (never_returns, "did not return within 3 s"),
        (returns_a_number, r"returned int: it must return an engine"),
        (wants_three, r"takes 3 arguments: it must take \(model, comm\)"),
        (fails, "KeyError: 'on purpose'"),
    ],
)
def test_what_cannot_be_named_is_said_in_one_sentence(world_of, make, words):
    with pytest.raises(ValueError, match=words) as caught:
        identify(make, world=world_of(FOUR), timeout=3.0 if make is never_returns else 300.0)
    assert "\n" not in str(caught.value)


def test_one_rank_and_unknown_claims_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        identify(Stage1, ranks=1)
    with pytest.raises(ValueError, match="the nearest are"):
        identify(Stage1, claimed="stage 4")


STEPS = """
from zerolab.practice.stage2 import Stage2

def make(model, comm):
    return Stage2(model, comm)
"""


def test_the_command_names_a_function_of_a_file(tmp_path, capsys):
    file = tmp_path / "steps.py"
    file.write_text(STEPS)
    assert main(["identify", f"{file}:make", "--ranks", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["name"] == "stage 2"
    assert shown["held_bytes"]["gradients"] == 104_334  # 2 bytes of half of them, one padded
    assert main(["identify", f"{file}:make", "--ranks", "2", "--claim", "stage-3"]) == 1
    assert "This is stage 2, not stage 3" in capsys.readouterr().out


def test_what_a_file_prints_is_no_part_of_the_object(tmp_path, capsys):
    file = tmp_path / "steps.py"
    file.write_text(
        "print('read')\n" + STEPS.replace("    return", "    print('made')\n    return")
    )
    assert main(["identify", f"{file}:make", "--ranks", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["name"] == "stage 2"
    assert "read" in captured.err and "made" in captured.err


@pytest.mark.parametrize(
    ("text", "what", "words"),
    [
        (STEPS, "steps.py:mke", "has no function mke: it has make"),
        (STEPS, "steps.py", "FILE:FUNCTION"),
        (STEPS, "other.py:make", "no file"),
        ("def make(:", "steps.py:make", "cannot be run: SyntaxError"),
        ("import nothing_like_it", "steps.py:make", "cannot be run: ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "steps.py:make", "cannot be run: SystemExit: 3"),
        ("raise ValueError('a\\nb')", "steps.py:make", "cannot be run: ValueError: a b"),
    ],
)
def test_a_file_that_does_not_do_gets_one_sentence(
    tmp_path, monkeypatch, capsys, text, what, words
):
    monkeypatch.chdir(tmp_path)
    Path("steps.py").write_text(text)
    assert main(["identify", what]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


BAD_STEPS = """
from zerolab.practice.stage2 import Stage2

def fails(model, comm):
    def step(tokens, targets):
        raise KeyError("on purpose")
    return step

def fails_on_one(model, comm):
    engine = Stage2(model, comm)
    def step(tokens, targets):
        if comm.rank == 1:
            raise KeyError("on purpose")
        engine.backward(model.loss(tokens, targets))
    return step

def trains_nothing(model, comm):
    def step(tokens, targets):
        model.loss(tokens, targets).backward()
        model.zero_grad()
    return step
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", ["The step stopped on rank 0: KeyError: 'on purpose'",
                   "The step stopped on rank 1: KeyError: 'on purpose'"]),
        ("fails_on_one", ["The step stopped on rank 1: KeyError: 'on purpose'"]),
        ("trains_nothing", ["The step trains nothing: after a step every weight is as it was."]),
    ],
)  # fmt: skip
def test_of_a_launchers_ranks_one_tells_of_a_bad_step_in_one_sentence(tmp_path, name, words):
    (tmp_path / "steps.py").write_text(BAD_STEPS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "zerolab", "identify", f"{tmp_path / 'steps.py'}:{name}"]
    given = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen([*command, "--ranks", "2"], env={**given, "RANK": rank}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in ("0", "1")
    ]  # fmt: skip
    out, said = zip(*(rank.communicate(timeout=600) for rank in ranks), strict=True)
    sentences = [line for line in "".join(said).splitlines() if "zerolab: rank" not in line]
    assert len(sentences) == 1
    assert sentences[0] in [f"zerolab identify: {text}" for text in words]
    assert out == ("", "") and [rank.returncode for rank in ranks] == [2, 2]


def test_every_name_but_none_can_come_out():
    assert len(set(NAMES)) == 9


def frozen_at_each_collection():
    """How many objects a collection of garbage passes over, for each one that observe makes."""
    import gc

    from zerolab.practice.observe import observe

    collect, frozen = gc.collect, []

    def counted():
        frozen.append(gc.get_freeze_count())
        return collect()

    gc.collect = counted
    try:
        observe(Stage2)
    finally:
        gc.collect = collect
    return frozen


def test_each_look_for_garbage_but_the_first_passes_over_what_was_there_before(world_of):
    for _, *looks in world_of(2).run(frozen_at_each_collection):
        assert len(looks) > 10 and min(looks) > 100_000
