"""Checkpoints: saved anywhere, resumed anywhere, the same bits; whole or not there; or refused."""

import hashlib
import json
import os
import pickle
import shutil
import sys

import cloudpickle
import pytest
import torch

from zerolab.practice import data, snapshots
from zerolab.practice.adamw import AdamW
from zerolab.practice.comm import sum_in_rank_order
from zerolab.practice.gpt import GPT, GPTConfig
from zerolab.practice.measure import digest
from zerolab.practice.precision import PRECISIONS
from zerolab.practice.sharding import flatten, views
from zerolab.practice.world import RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import pytest

STAGES = (0, 1, 2, 3)
SMALL = GPTConfig(width=12, heads=2, layers=1)  # 2,941 parameters: of 2, 3 and 4 none divides it
KINDS = ("weights", "momentum", "variance")


# ---- what ranks run


def begin(stage, recipe="adamw-mixed", config=SMALL, frozen="nothing", seed=0):
    """Makes an engine; parameters whose name begins with `frozen` are not trained."""
    from zerolab.practice.comm import Comm
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.measure import STAGES as ENGINES

    model = GPT(config, seed)
    for name, param in model.named_parameters():
        param.requires_grad = not name.startswith(frozen)
    namespace()["engine"] = ENGINES[stage](model, Comm(), recipe=recipe)


def advance(first, last):
    """Trains the steps from number `first` up to and without `last`; returns the last loss."""
    from zerolab.practice.launcher.rank import namespace

    engine = namespace()["engine"]
    for step in range(first, last):
        batch = data.batch(step, engine.comm.rank, engine.comm.world_size, 2, 1)
        loss = engine.model.loss(*batch)
        engine.backward(loss)
        engine.step()
    return loss.item()


def save(folder, steps):
    from zerolab.practice import checkpoint
    from zerolab.practice.launcher.rank import namespace

    checkpoint.save(namespace()["engine"], folder, steps, {"saved": steps})


def load(folder):
    """What the load gave, or the sentence with which it refused."""
    from zerolab.practice import checkpoint
    from zerolab.practice.launcher.rank import namespace

    try:
        return checkpoint.load(namespace()["engine"], folder)
    except checkpoint.CheckpointError as refusal:
        return str(refusal)


def state():
    """All that training has made: every flat tensor by name, whole, and the number of updates.

    Working parameters are this rank's own copy where it has one.
    """
    from zerolab.practice.launcher.rank import namespace

    engine = namespace()["engine"]
    comm, whole = engine.comm, {}
    for unit in engine.units:
        there = unit.full_params.untyped_storage().nbytes() > 0
        flats = {"working": unit.full_params if there else unit.param_shard}
        if unit.trainable:
            adamw = unit.adamw
            flats |= dict(zip(KINDS, (adamw.master, adamw.momentum, adamw.variance), strict=True))
            whole["updates"] = torch.tensor(adamw.steps)
        for kind, flat in flats.items():
            for name, tensor in unit.whole(flat, comm).items():
                whole[f"{name}.{kind}"] = tensor.clone()
    return whole


def with_death_at(point, rank, folder, steps):
    """Saves, and is killed (as by kill -9) on one rank at that point of the save."""
    import os
    import signal

    from torch.distributed.checkpoint import FileSystemWriter

    from zerolab.practice import checkpoint
    from zerolab.practice.launcher.rank import namespace

    def die(*_args, **_more):
        os.kill(os.getpid(), signal.SIGKILL)

    if namespace()["engine"].comm.rank == rank:
        if point == "data":
            FileSystemWriter.write_data = die
        elif point == "manifest":
            checkpoint.snapshots.commit = die
        elif point == "rename":
            snapshots.Path.rename = die
    save(folder, steps)


def with_a_full_disk(rank, folder, steps):
    """Saves where one rank's disk is full; returns the refusal."""
    from torch.distributed.checkpoint import FileSystemWriter

    from zerolab.practice.checkpoint import CheckpointError
    from zerolab.practice.launcher.rank import namespace

    write_data = FileSystemWriter.write_data

    def fail(*_args, **_more):
        raise OSError(28, "No space left on device")

    if namespace()["engine"].comm.rank == rank:
        FileSystemWriter.write_data = fail
    try:
        return save(folder, steps)
    except CheckpointError as refusal:
        return str(refusal)
    finally:
        FileSystemWriter.write_data = write_data


# ---- the same bits


def trained(world, folder, steps=4, **how):
    """Trains and saves; returns the state, which all ranks agree on."""
    world.run(begin, **how)
    world.run(advance, 0, steps)
    world.run(save, folder, steps)
    return the_state(world)


def the_state(world):
    first, *others = world.run(state)
    for other in others:
        expect_same(first, other)
    return first


def expect_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert digest(one[name].flatten()) == digest(other[name].flatten()), name


def one_process_goes_on(whole, recipe, first, last, ranks):
    """The same training from that state without ranks: one flat vector, sums in rank order.

    It runs on a rank all the same, as the number of threads changes bits.
    """
    precision, model = PRECISIONS[recipe], GPT(SMALL)
    names, params = zip(*model.named_parameters(), strict=True)
    shapes, numel = [p.shape for p in params], sum(p.numel() for p in params)

    def flat(kind):
        return flatten([whole[f"{name}.{kind}"] for name in names], numel, torch.float32)

    adamw = AdamW(flat("weights"))
    adamw.momentum, adamw.variance = flat("momentum"), flat("variance")
    adamw.steps = int(whole["updates"])
    for step in range(first, last):
        for param, values in zip(
            params, views(adamw.master.to(precision.working), shapes), strict=True
        ):
            param.grad, param.data = None, values
        grads = []
        for rank in range(ranks):
            model.loss(*data.batch(step, rank, ranks, 2, 1)).backward()
            grads.append(flatten([p.grad for p in params], numel, precision.gradient))
            model.zero_grad()
        adamw.update(sum_in_rank_order(grads).to(precision.gradient), 1 / ranks)
    return dict(zip(KINDS, (adamw.master, adamw.momentum, adamw.variance), strict=True))


@pytest.mark.parametrize("recipe", PRECISIONS)
@pytest.mark.parametrize(("ranks", "others"), [(3, 2), (2, 4), (1, 3)])
def test_any_stage_and_rank_count_goes_on_from_any_other_with_the_same_bits(
    world_of, tmp_path, ranks, others, recipe
):
    stages = STAGES if (ranks, recipe) == (3, "adamw-mixed") else (0, 3)
    for saver in stages:
        folder = tmp_path / str(saver)
        before = trained(world_of(ranks), folder, stage=saver, recipe=recipe)
        for loader in stages:
            world = world_of(others)
            world.run(begin, loader, recipe, seed=1)  # other weights, until the load
            assert world.run(load, folder) == [(4, {"saved": 4})] * others
            expect_same(the_state(world), before)
            world.run(advance, 4, 6)
            after = the_state(world)
            (expected,) = world.run(one_process_goes_on, before, recipe, 4, 6, others, ranks=[0])
            names = [name for name, _ in GPT(SMALL).named_parameters()]
            for kind, flat in expected.items():
                ours = torch.cat([after[f"{name}.{kind}"].flatten() for name in names])
                assert digest(ours) == digest(flat), (saver, loader, kind)


@pytest.mark.parametrize(
    "how",
    [
        {"frozen": "embedding"},
        {"frozen": "blocks.0.qkv", "recipe": "adamw-fp32"},
        {"config": GPTConfig(width=12, heads=2, layers=1, tied=True)},
        {"config": GPTConfig(width=2, heads=1, layers=1)},  # shards of a few elements, or none
    ],
    ids=["frozen-unit", "frozen-part-fp32", "tied", "tiny"],
)
def test_frozen_and_tied_parameters_and_tiny_shards_are_restored(world_of, tmp_path, how):
    for saver, loader in ((0, 3), (3, 1), (2, 0), (1, 2)):
        folder = tmp_path / f"{saver}"
        before = trained(world_of(2), folder, stage=saver, **how)
        world = world_of(4)
        world.run(begin, loader, seed=1, **how)
        world.run(load, folder)
        expect_same(the_state(world), before)


@pytest.mark.parametrize("stage", STAGES)
def test_each_element_is_written_once_by_its_owner_and_no_padding(world_of, tmp_path, stage):
    from torch.distributed.checkpoint import FileSystemReader

    ranks = 3
    trained(world_of(ranks), tmp_path, stage=stage)
    index = FileSystemReader(snapshots.finished(tmp_path)[0]).read_metadata()
    written = {f"__{rank}_0.distcp": 0 for rank in range(ranks)}
    for key, info in index.state_dict_metadata.items():
        if not key.startswith("random@"):
            chunk = info.chunks[0]
            (file,) = {
                at.relative_path for where, at in index.storage_data.items() if where.fqn == key
            }
            written[file] += chunk.sizes.numel()
    params = sum(p.numel() for p in GPT(SMALL).parameters())
    assert sum(written.values()) == 3 * params  # weights, momentum, variance
    units = 1 if stage < 2 else 3
    share = params / ranks
    assert all(3 * (share - 2 * units) <= number <= 3 * (share + units)
               for number in written.values())  # fmt: skip


# ---- whole, or not there


@pytest.mark.parametrize(("point", "rank"), [("data", 1), ("manifest", 0), ("rename", 0)])
def test_a_kill_in_the_middle_of_a_save_leaves_the_last_good_one(world_of, tmp_path, point, rank):
    world = world_of(2)
    before = trained(world, tmp_path, stage=2)
    world.run(advance, 4, 5)
    with pytest.raises(RankError, match=f"rank {rank}"):
        world.run(with_death_at, point, rank, tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")]
    world.restart()
    world.run(begin, 3, seed=1)
    assert world.run(load, tmp_path)[0] == (4, {"saved": 4})
    expect_same(the_state(world), before)
    world.run(advance, 4, 5)
    world.run(save, tmp_path, 5)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-00000004", "step-00000005"]  # what was left over is swept


def test_a_rank_that_cannot_write_is_named_on_all_and_the_last_good_one_stays(world_of, tmp_path):
    world = world_of(2)
    trained(world, tmp_path, stage=1)
    said = world.run(with_a_full_disk, 1, tmp_path, 5)
    assert said[0] == said[1]
    assert "Rank 1 cannot write" in said[0]
    assert "No space left" in said[0]
    assert world.run(load, tmp_path)[1] == (4, {"saved": 4})
    world.run(save, tmp_path, 5)
    assert world.run(load, tmp_path)[1] == (5, {"saved": 5})


def test_the_last_two_are_kept_and_a_finished_one_is_never_overwritten(world_of, tmp_path):
    world = world_of(2)
    trained(world, tmp_path, stage=3)
    for steps in (5, 6):
        world.run(save, tmp_path, steps)
    assert [path.name for path in snapshots.finished(tmp_path)] == [
        "step-00000005", "step-00000006"]  # fmt: skip
    with pytest.raises(RankError, match="step-00000006 exists already"):
        world.run(save, tmp_path, 6)


def test_other_things_in_the_folder_are_no_checkpoints_and_stay(world_of, tmp_path):
    world = world_of(2)
    for name in ("step-by-step", "step-notes.partial", "step-5", "step-00000099-copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("kept")
    (tmp_path / "step-zero.txt").write_text("kept")
    mine = set(tmp_path.rglob("*"))
    good = trained(world, tmp_path, stage=1)
    for steps in (5, 6):
        world.run(save, tmp_path, steps)
    assert [path.name for path in snapshots.finished(tmp_path)] == [
        "step-00000005", "step-00000006"]  # fmt: skip
    assert world.run(load, tmp_path)[0] == (6, {"saved": 6})
    expect_same(the_state(world), good)
    assert mine <= set(tmp_path.rglob("*"))


# ---- refused in a sentence


def truncated(path):
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def altered(path):
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def altered_index(path):
    file = path / ".metadata"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def altered_manifest(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"steps": 5', '"steps": 4'))


def with_manifest(path, text):
    digest_of_it = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(f"{digest_of_it}\n{text}")


DAMAGES = {
    truncated: "__1_0.distcp is not what was saved",
    altered: "__0_0.distcp is not what was saved",
    altered_index: ".metadata is not what was saved",
    altered_manifest: "manifest.json is not what was saved",
    lambda path: (path / "__0_0.distcp").unlink(): "__0_0.distcp is missing",
    lambda path: (path / "manifest.json").unlink(): "manifest.json is missing",
    lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"): "manifest.json is missing or",
    lambda path: (path / "manifest.json").write_bytes(b""): "manifest.json is not what was saved",
    lambda path: with_manifest(path, "{}"): "manifest.json is not what was saved",
    lambda path: with_manifest(path, "[1]"): "manifest.json is not what was saved",
    lambda path: with_manifest(path, "{"): "manifest.json is missing or cannot be read",
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.items(), ids=list(DAMAGES.values()))
def test_a_damaged_checkpoint_is_named_with_the_way_out_before_anything_changes(
    world_of, tmp_path, damage, words
):
    world = world_of(2)
    good = trained(world, tmp_path, stage=1)
    world.run(save, tmp_path, 5)
    last = snapshots.finished(tmp_path)[-1]
    damage(last)
    world.run(begin, 2, seed=1)
    untouched = the_state(world)
    said = world.run(load, tmp_path)
    assert said[0] == said[1]
    assert words in said[0]
    assert f"Remove {last} to go on from step-00000004." in said[0]
    assert "\n" not in said[0]
    expect_same(the_state(world), untouched)
    shutil.rmtree(last)
    assert world.run(load, tmp_path)[0] == (4, {"saved": 4})
    expect_same(the_state(world), good)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"config": GPTConfig(width=8, heads=2, layers=1)},
         "another model's: embedding.token.weight is [13, 12] there and [13, 8] here"),
        ({"config": GPTConfig(width=12, heads=2, layers=2)},
         "another model's: blocks.1.norm1.weight is missing there"),
        ({"frozen": "head.out.bias"}, "head.out.bias is [13] there and [13] and frozen here"),
        ({"recipe": "adamw-fp32"}, "the recipe adamw-mixed, and this one is adamw-fp32"),
    ],
    ids=["width", "layers", "frozen", "recipe"],
)  # fmt: skip
def test_a_foreign_checkpoint_is_refused_in_one_sentence(world_of, tmp_path, how, words):
    world = world_of(2)
    trained(world, tmp_path, stage=1)
    world.run(begin, 3, **how)
    said = world.run(load, tmp_path)
    assert said[0] == said[1]
    assert words in said[0]
    assert "\n" not in said[0]
    assert world.run(advance, 0, 1)  # the world stays usable


# ---- made by a stranger, with a manifest to match


class Runs:
    """A pickle that makes a folder as soon as it is loaded."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def with_new_index(path, index):
    """Replaces a checkpoint's index, and has its manifest vouch for the new one."""
    (path / ".metadata").write_bytes(pickle.dumps(index))
    _, _, text = (path / "manifest.json").read_text().partition("\n")
    manifest = json.loads(text)
    manifest["files"][".metadata"] = snapshots.fingerprint(path / ".metadata")
    with_manifest(path, json.dumps(manifest))


def test_a_foreign_checkpoints_index_runs_no_code(world_of, tmp_path):
    world = world_of(2)
    folder, proof = tmp_path / "foreign", tmp_path / "it ran"
    trained(world, folder, stage=1)
    path = snapshots.finished(folder)[-1]
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = Runs(proof)
    with_new_index(path, index)
    world.run(begin, 2, seed=1)
    untouched = the_state(world)
    for said in world.run(load, folder):
        assert f"is no index of a checkpoint: it asks for {os.name}.mkdir. Do not use" in said
        assert "\n" not in said
    assert not proof.exists()
    expect_same(the_state(world), untouched)
    pickle.loads((path / ".metadata").read_bytes())
    assert proof.exists()  # the index would have run it


def test_a_foreign_checkpoints_tensors_run_no_code(world_of, tmp_path):
    world = world_of(2)
    folder, proof = tmp_path / "foreign", tmp_path / "it ran"
    trained(world, folder, stage=1)
    path = snapshots.finished(folder)[-1]
    index = pickle.loads((path / ".metadata").read_bytes())
    torch.save(Runs(proof), path / "harm")
    for info in index.storage_data.values():
        info.relative_path, info.offset, info.length = "harm", 0, (path / "harm").stat().st_size
    with_new_index(path, index)
    world.run(begin, 1)
    with pytest.raises(RankError, match="Weights only load failed"):
        world.run(load, folder)
    assert not proof.exists()


def test_a_foreign_checkpoint_reads_nothing_outside_of_its_folder(world_of, tmp_path):
    world = world_of(2)
    trained(world, tmp_path, stage=1)
    path = snapshots.finished(tmp_path)[-1]
    index = pickle.loads((path / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../diary"
    with_new_index(path, index)
    world.run(begin, 1)
    for said in world.run(load, tmp_path):
        assert "is no index of a checkpoint: it points to ../diary. Do not use" in said


@pytest.mark.parametrize("folder", ["empty", "nowhere", "unfinished"])
def test_a_missing_checkpoint_is_refused_in_one_sentence(world_of, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished" / "step-00000004.partial").mkdir(parents=True)
    world = world_of(2)
    world.run(begin, 0)
    for said in world.run(load, tmp_path / folder):
        assert said.startswith(f"There is no checkpoint in {tmp_path / folder}: ")
