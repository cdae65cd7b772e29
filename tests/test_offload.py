"""Offload: what each tier holds, what crosses, and the bits of training without it."""

import os

import pytest

from zerolab import RankError, World
from zerolab.course.offload import measure_offload
from zerolab.practice.gpt import GPTConfig
from zerolab.practice.offload import CHOICES, Offload
from zerolab.practice.tiers import TierError


def possible(stage):
    """Every offload that a stage can run."""
    for optimizer in CHOICES["optimizer"]:
        for parameters in CHOICES["parameters"]:
            for schedule in CHOICES["schedule"]:
                offload = Offload(optimizer, parameters, schedule)
                try:
                    offload.check(stage, "adamw-mixed")
                except ValueError:
                    continue
                yield offload


def expect_agreement(compared):
    assert compared.measured == compared.predicted
    assert compared.equal
    assert compared.bitwise
    assert compared.agrees
    return compared


CASES = [(stage, offload) for stage in (1, 2, 3) for offload in possible(stage)]


def name_of(value):
    return (
        "-".join([value.optimizer, value.parameters, value.schedule])
        if isinstance(value, Offload)
        else str(value)
    )


@pytest.mark.parametrize(
    ("ranks", "stage", "offload"),  # on fewer ranks what goes the longest way alone
    [(4, *case) for case in CASES]
    + [(ranks, *case) for ranks in (1, 2) for case in CASES if case[1].optimizer == "disk"],
    ids=name_of,
)
def test_every_byte_is_derived_and_no_bit_changes(world_of, ranks, stage, offload):
    compared = expect_agreement(
        measure_offload(stage, ranks, offload, steps=2, world=world_of(ranks))
    )
    assert compared.measured["held on the device"]["optimizer_states"] == 0
    assert compared.same_as_undelayed == (offload.schedule != "delayed")


RECIPE_CASES = [
    (1, Offload("disk")),
    (2, Offload("cpu", schedule="stream")),
    (3, Offload("disk", "cpu", "delayed")),
]


@pytest.mark.parametrize(("stage", "offload"), RECIPE_CASES, ids=name_of)
@pytest.mark.parametrize(
    "more",
    [
        {"recipe": "adamw-mixed-fp32-grads"},
        {"micro_batches": 3},
        {"micro_batches": 2, "max_norm": 0.3},
        {"model": GPTConfig(tied=True)},
        {"model": GPTConfig(recompute=True, dropout=0.2)},
        {"model": GPTConfig(width=2, heads=1, layers=1)},  # shards of a few elements
    ],
    ids=lambda more: "-".join(more),
)
def test_all_that_training_needs_changes_no_bit(world_of, stage, offload, more):
    expect_agreement(measure_offload(stage, 3, offload, steps=2, world=world_of(3), **more))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_4_bytes_a_parameter_cross_over_all_ranks_and_more_where_more_is_below(
    world_of, micro_batches
):
    def crossing(stage, offload):
        done = measure_offload(
            stage, 2, offload, steps=1, world=world_of(2), micro_batches=micro_batches
        )
        assert done.measured == done.predicted
        return {way: 2 * size for way, size in done.measured["crossed in a step"].items()}

    a, each = micro_batches, 2 * 104_334  # bytes of all gradients, or all parameters; 1 is padding
    assert crossing(1, Offload()) == {"down": each, "up": each}
    assert crossing(2, Offload()) == {"down": each, "up": each}
    assert crossing(2, Offload(schedule="stream")) == {"down": a * each, "up": each}
    below = Offload("cpu", "cpu", "stream")
    assert crossing(3, below) == {"down": a * each, "up": 2 * a * each}


def test_a_delayed_update_computes_with_parameters_that_lack_the_last_gradient(world_of):
    plain = measure_offload(2, 2, Offload(), steps=4, world=world_of(2))
    late = measure_offload(2, 2, Offload(schedule="delayed"), steps=4, world=world_of(2))
    assert late.bitwise and not late.same_as_undelayed and late.difference > 0
    # the first update is there for the third step, one later than without delay
    assert late.losses[0] == plain.losses[0]
    assert late.losses[1] != plain.losses[1]
    assert late.losses[2] != plain.losses[2]


def trains_frozen(offload):
    """Losses and master weights of stage 3 with a frozen embedding, overlap and prefetch."""
    from zerolab.practice import data
    from zerolab.practice.comm import Comm
    from zerolab.practice.gpt import GPT
    from zerolab.practice.measure import STAGES, digest
    from zerolab.practice.offload import Offloaded

    comm, model = Comm(), GPT()
    model.embedding.requires_grad_(False)
    fast = {"overlap": True, "prefetch": True}
    if offload is None:
        engine = STAGES[3](model, comm, **fast)
    else:
        engine = Offloaded(3, model, comm, offload=offload, **fast)
    losses = []
    for at in range(3):
        loss = model.loss(*data.batch(at, comm.rank, comm.world_size))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, [digest(unit.adamw.master) for unit in engine.units if unit.trainable]


@pytest.mark.parametrize("where", ["device", "cpu", "disk"])
def test_frozen_units_overlap_and_prefetch_change_no_bit(world_of, where):
    free = world_of(2).run(trains_frozen, None)
    for optimizer, schedule in (("cpu", "plain"), ("disk", "stream")):
        assert world_of(2).run(trains_frozen, Offload(optimizer, where, schedule)) == free


def mixes_tiers(how):
    import torch

    from zerolab.practice.meter import Meter
    from zerolab.practice.tiers import down, on_cpu, tier_of, up

    with Meter() as meter:
        there = torch.ones(6)
        below = down(there)
        if how == "add":
            return below + there
        if how == "convert":
            return there.copy_(below.double())
        with on_cpu():
            made = torch.zeros(2)
        results = [tier_of(t) for t in (there, below, below * 2, up(below), made, below.sum())]
        here, crossed = there * below.sum(), dict(meter.crossed)  # one number may cross unseen
        held = meter.held()["total"], meter.held("cpu")["total"]
        return results, tier_of(here), crossed, held


def test_the_meter_passes_tiers_on_and_books_what_crosses():
    results, here, crossed, held = mixes_tiers("")
    assert results == ["device", "cpu", "cpu", "device", "cpu", "cpu"]
    assert here == "device"
    assert crossed == {"down": 24, "up": 24}
    assert held == (2 * 24, 24 + 8)


@pytest.mark.parametrize("how", ["add", "convert"])
def test_what_mixes_tiers_is_refused_as_a_device_would(how):
    with pytest.raises(TierError, match="first"):
        mixes_tiers(how)


def trained(offload, steps, folder=None, resume=False, stage=2):
    """Losses of a short training, and a fingerprint of the weights (on a rank)."""
    from zerolab.practice.measure import digest
    from zerolab.practice.train import Trainer, Training

    small = Training(stage, micro_batches=8, lines=64, offload=offload)
    trainer = Trainer(small, folder, resume)
    trainer.advance(steps, True)
    shards = [unit.adamw.master for unit in trainer.engine.units]
    return trainer.about["curve"], [digest(shard) for shard in shards]


def test_a_device_that_refuses_the_states_trains_with_them_on_disk():
    with World(2, timeout=600) as world:
        free = world.run(trained, None, 2)
    with World(2, timeout=600, device_memory="0.9 MB") as world:
        with pytest.raises(RankError, match=r"900,000; at this moment: .*optimizer states"):
            world.run(trained, None, 2)
        for schedule in ("plain", "stream"):
            assert world.run(trained, Offload("disk", schedule=schedule), 2) == free


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(2, Offload("disk")), (3, Offload("cpu", "disk")), (1, Offload("cpu"))],
    ids=name_of,
)
def test_a_checkpoint_goes_on_with_and_without_offload(world_of, tmp_path, stage, offload):
    world = world_of(2)
    straight = world.run(trained, None, 4, stage=stage)[0][1]
    for first, then in ((offload, None), (None, offload)):
        folder = str(tmp_path / f"{first is None}")
        world.run(trained, first, 2, folder, stage=stage)
        assert world.run(trained, then, 2, folder, True, stage=stage)[0][1] == straight


def breaks_in_a_step(harm):
    """Trains two steps, harms the file, and says what the next steps say."""
    import os

    from zerolab.practice import data
    from zerolab.practice.comm import Comm
    from zerolab.practice.gpt import GPT
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.offload import Offloaded

    comm, model = Comm(), GPT()
    engine = Offloaded(2, model, comm, offload=Offload("disk"))
    namespace()["engine"] = engine

    def step(at):
        engine.backward(model.loss(*data.batch(at, comm.rank, comm.world_size)))
        engine.step()

    step(0)
    step(1)
    file = engine.files[0]
    if comm.rank == 1:
        place = file._offset(2, file._marks[2][0])
        if harm == "truncated":
            os.truncate(file.path, place)
        elif harm == "altered":
            with open(file.path, "r+b") as other:
                other.seek(place + 100)
                other.write(b"x")
        else:  # killed in the middle of a write
            write, fatal = os.pwrite, file._offset(2, 1 - file._marks[2][0])

            def half(descriptor, view, at):
                if at == fatal:
                    write(descriptor, view[:4096], at)
                    os.kill(os.getpid(), 9)
                return write(descriptor, view, at)

            os.pwrite = half
    step(2)


def steps_again():
    from zerolab.practice.launcher.rank import namespace

    namespace()["engine"].step()


@pytest.mark.parametrize(("harm", "words"), [("truncated", "shorter"), ("altered", "altered")])
def test_a_harmed_file_stops_all_ranks_with_one_sentence(harm, words):
    with World(2, timeout=600) as world:
        lost = rf"rank 1.*optimizer states, record 2 of 4: the file .*{words}.* version 3 is lost"
        with pytest.raises(RankError, match=lost):
            world.run(breaks_in_a_step, harm)
        with pytest.raises(RankError, match="this engine is of no use any more"):
            world.run(steps_again)
        expect_agreement(measure_offload(2, 2, Offload("disk"), steps=1, world=world))


def left_behind(sizes):
    """The version of the file that a killed rank left, all of whose records must be whole."""
    from zerolab.practice.launcher.rank import folder, namespace
    from zerolab.practice.statefile import Buffer, StateFile

    path = f"{folder()}/optimizer-states-{namespace()['RANK']}-0.bin"
    file = StateFile.found(path, sizes, "states")
    for index, size in enumerate(sizes):
        buffer = Buffer(size)
        file.read(index, buffer)
        file.check(index, buffer)
    return file.version


def test_a_rank_that_is_killed_while_it_writes_leaves_the_last_finished_step():
    job = measure_offload(2, 2, Offload("disk"), steps=1)
    with World(2, timeout=600) as world:
        with pytest.raises(RankError, match="rank 1 was killed"):
            world.run(breaks_in_a_step, "killed")
        sizes = [12 * -(-unit // 2) for unit in GPT_UNITS]
        assert job.params == sum(GPT_UNITS)
        # the start was version 1, two steps made it 3; the third is not used
        assert world.run(left_behind, sizes, ranks=[1]) == [3]


GPT_UNITS = [13 * 64 + 40 * 64, 49_984, 49_984, 2 * 64 + 13 * 64 + 13]


def peak_of_a_disk_step(offload):
    """Resident bytes at the peak of a step, over 32 units of 393,984 parameters, and of states.

    Without pages of files, such as torch's own code: the system takes those away when it likes.
    """
    import torch
    from torch import nn

    from zerolab.practice.comm import Comm
    from zerolab.practice.offload import Offloaded

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 768) for _ in range(32))

        def units(self):
            return list(self.layers)

        def forward(self, x):
            return sum(layer(x).float().sum() for layer in self.layers)

    torch.manual_seed(0)
    engine = Offloaded(2, Chain(), Comm(), offload=offload)
    for _ in range(3):
        engine.backward(engine.model(torch.ones(1, 512, dtype=torch.bfloat16)))
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")  # forgets the peak
        engine.step()
        with open("/proc/self/status") as status:
            kib = {line.split(":")[0]: line.split()[1] for line in status if line.endswith("kB\n")}
            peak = int(kib["VmHWM"]) - int(kib["RssFile"])
    buffers = sum(len(buffer.memory) for buffer in getattr(engine.states, "buffers", []))
    cached = sum(file.cached_bytes() or 0 for file in engine.files)
    return peak * 1024, 12 * sum(unit.padded for unit in engine.units), buffers, cached


def test_a_disk_step_holds_two_units_and_less_than_a_tenth_of_the_states():
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell a process's peak")
    with World(1, timeout=600) as world:
        in_memory, states, _, _ = world.run(peak_of_a_disk_step, Offload("cpu"))[0]
    with World(1, timeout=600) as world:
        on_disk, _, buffers, cached = world.run(peak_of_a_disk_step, Offload("disk"))[0]
    base = in_memory - states
    assert buffers < states / 10
    assert on_disk <= base + states / 10 + buffers
    assert cached == 0


def late_reads(late):
    """Trains, perhaps with a disk that reads only what an update asks for; weights, late reads."""
    import threading

    from zerolab.practice import data
    from zerolab.practice.comm import Comm
    from zerolab.practice.gpt import GPT
    from zerolab.practice.measure import digest
    from zerolab.practice.offload import Offloaded

    comm, model = Comm(), GPT()
    engine = Offloaded(2, model, comm, offload=Offload("disk"))
    submit, read, asked, reads = (
        engine.states.disk.submit,
        engine.states.file.read,
        threading.Event(),
        [],
    )

    def read_late(*arguments):
        assert asked.wait(60), "nobody asked for this read"
        asked.clear()
        read(*arguments)
        reads.append(arguments)

    def submit_and_tell(*job):
        future = submit(*job)
        result = future.result
        future.result = lambda: asked.set() or result()
        return future

    if late:
        engine.states.file.read, engine.states.disk.submit = read_late, submit_and_tell
    for at in range(2):
        engine.backward(model.loss(*data.batch(at, comm.rank, comm.world_size)))
        engine.step()
    engine.states.file.read = read
    return [digest(unit.adamw.master) for unit in engine.units], len(reads)


def test_a_reader_slower_than_the_step_is_waited_for(world_of):
    prompt, late = (world_of(2).run(late_reads, late)[0] for late in (False, True))
    assert late[0] == prompt[0]
    assert late[1] == 2 * len(late[0])  # every unit in each of two steps


def changed_between_backward_and_update(where):
    """The weights after a step before which one unit's states were doubled; bytes read until then.

    With states on disk the first two units have been read when backward is done.
    """
    from zerolab.practice import data
    from zerolab.practice.comm import Comm
    from zerolab.practice.gpt import GPT
    from zerolab.practice.measure import digest
    from zerolab.practice.offload import Offloaded

    comm, model = Comm(), GPT()
    engine = Offloaded(2, model, comm, offload=Offload(where))
    engine.backward(model.loss(*data.batch(0, comm.rank, comm.world_size)))
    read = 0
    for file in engine.files:
        engine.states.disk.submit(int).result()  # after what is on its way
        read = file.read_bytes - sum(-(-size // 4096) * 4096 for size in file.sizes[:2])
    with engine.opened(engine.units[1]):
        engine.units[1].adamw.master.mul_(2)
    engine.step()
    digests = [digest(unit.adamw.master) for unit in engine.units]
    engine.close()
    return digests, read


def test_two_units_are_read_in_backward_and_once_more_if_they_change_after_it(world_of):
    on_disk, in_memory = (
        world_of(2).run(changed_between_backward_and_update, where)[0] for where in ("disk", "cpu")
    )
    assert on_disk == in_memory == (in_memory[0], 0)


def test_the_files_go_when_the_world_closes():
    with World(2, timeout=600) as world:
        with pytest.raises(RankError):
            world.run(breaks_in_a_step, "altered")
        where = world.run(path_of_the_file)
        assert [os.path.exists(path) for path in where] == [True, True]
    assert [os.path.exists(os.path.dirname(path)) for path in where] == [False, False]


def path_of_the_file():
    from zerolab.practice.launcher.rank import namespace

    return namespace()["engine"].files[0].path


def test_a_folder_that_nobody_can_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"--offload-folder {tmp_path} is not writable"):
        Offload("disk", folder=str(tmp_path))


def names_while_open(folder):
    """What a folder shows while an engine's file is in it, and whether the file is there."""
    from zerolab.practice.comm import Comm
    from zerolab.practice.gpt import GPT
    from zerolab.practice.offload import Offloaded

    engine = Offloaded(2, GPT(), Comm(), offload=Offload("disk", folder=folder))
    names, written = os.listdir(folder), engine.files[0].written_bytes
    engine.close()
    return names, written > 0


def test_a_folder_of_one_s_own_shows_no_file(world_of, tmp_path):
    assert world_of(1).run(names_while_open, str(tmp_path)) == [([], True)]


@pytest.mark.parametrize(
    ("stage", "recipe", "text", "words"),
    [
        (0, "adamw-mixed", "optimizer=cpu", "stage 0 shards nothing"),
        (2, "adamw-mixed", "parameters=cpu", "Parameter offload needs stage 3"),  # case C8
        (1, "adamw-mixed", "schedule=stream", "stage 1 sums them in the step"),
        (2, "adamw-fp32", "optimizer=cpu", "no master weights"),
        (2, "adamw-mixed", "optimizer=tape", "cpu, disk"),
        (2, "adamw-mixed", "optimiser=cpu", "optimizer, parameters, schedule"),
        (2, "adamw-mixed", "", "optimizer, parameters, schedule"),
        (2, "adamw-mixed", "optimizer=cpu,optimizer=disk", "names something twice"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_in_a_sentence(stage, recipe, text, words):
    with pytest.raises(ValueError, match=words):
        Offload.read(text).check(stage, recipe)
