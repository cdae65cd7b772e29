"""Times with offload: predicted from rates by hand-checkable sums, and the edges of a plan."""

import pytest

from zerolab.cli import main
from zerolab.course.edges import edges
from zerolab.course.offload_time import predict_s
from zerolab.practice.offload import Offload
from zerolab.practice.rates import Rates
from zerolab.theory.plan import plan
from zerolab.theory.strategy import Strategy

# one rank: 4 bytes cross at 4/s, an update takes 2 s an element; the disk moves 12288 bytes/s
SLOW = Rates(1, 2, 4.0, 1e30, 12288.0, 12288.0, 1e30, 0.5, 0.0, "")
ELEMENTS = [1024, 1024, 1024]  # 12288 bytes of states each: one second to read, one to write


def seconds(offload, rates=SLOW, device_s=10.0):
    return predict_s(offload, rates, device_s, ELEMENTS, "adamw-mixed", 2)


def test_with_states_in_memory_a_plain_step_is_the_sum_of_its_parts():
    assert seconds(Offload())[0] == 10 + 3072 * (1 + 2)
    assert seconds(Offload(schedule="stream"))[0] == 10 + 3072 * (1 + 2)


def test_a_delayed_update_hides_behind_the_device_where_a_core_is_free():
    late = Offload(schedule="delayed")
    assert seconds(late)[0] == 3072 * 2 + 3072 * 1
    assert seconds(late, device_s=1e6)[0] == 1e6 + 3072 * 1
    busy = Rates(**{**vars(SLOW), "cores": 1})
    assert seconds(late, busy)[0] == 10 + 3072 * 3


def test_the_disk_bounds_a_step_whose_update_is_faster():
    quick = Rates(**{**vars(SLOW), "adamw_elements_per_s": 1e30, "copy_bytes_per_s": 1e30})
    step_s, disk_s = seconds(Offload("disk"), quick)
    assert disk_s == pytest.approx(4)  # backward is long enough to read two of the three
    assert step_s == pytest.approx(10 + 4)
    step_s, disk_s = seconds(Offload("disk"), quick, device_s=0.0)
    assert (step_s, disk_s) == (6, 6)
    late_s, _ = seconds(Offload("disk", schedule="delayed"), quick)
    assert late_s == pytest.approx(10)


def test_a_slow_update_bounds_a_step_but_for_the_last_write():
    step_s, _ = seconds(Offload("disk"))
    assert step_s == pytest.approx(10 + 3072 * 3 + 1)
    step_s, _ = seconds(Offload("disk"), device_s=0.0)
    assert step_s == pytest.approx(1 + 3072 * 3 + 1)


def test_the_host_s_memory_does_not_hold_the_states_of_175_billion_parameters():
    def verdicts(**more):
        made = plan("gpt3-175b", "dgx-a100", Strategy(3, recompute="full", **more))
        return {fit.tier: fit.verdict for fit in made.fits}, made

    assert verdicts(optimizer_on="cpu")[0]["cpu"] == "does not fit"
    found, made = verdicts(optimizer_on="nvme")
    assert found["cpu"] == found["nvme"] == "fits"
    host, disk = edges(made)
    assert host.enough and not disk.enough
    states = 12 * made.params
    assert 2 * states <= disk.num_bytes < 2 * states + 8 * 3 * 4096 + 12 * 8
    assert made.timeline.bound == "disk"


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [
        ("dgx2", Strategy(3, sequence=1024, micro_batch=8, optimizer_on="nvme")),
        ("dgx-a100", Strategy(2, accumulation=4, sequence=2048, optimizer_on="cpu")),
    ],
)
def test_an_edge_that_is_not_enough_is_what_the_timeline_calls_slower_than_compute(
    cluster, strategy
):
    made = plan(10e9, cluster, strategy)
    streams = {"GPU and CPU": "host link", "CPU and NVMe": "disk"}
    assert edges(made)
    for edge in edges(made):
        slower = made.timeline.busy_s(streams[edge.name]) > made.timeline.busy_s("compute")
        assert edge.enough == (not slower)


def test_case_c4_no_bandwidth_of_one_drive_hides_the_states_behind_a_small_step():
    made = plan(10e9, "dgx2", Strategy(3, sequence=1024, optimizer_on="nvme"))
    disk = edges(made)[-1]
    assert disk.num_bytes / 3e9 > made.timeline.busy_s("compute")


def test_without_offload_no_edge_is_shown():
    assert edges(plan("gpt2-xl", "dgx2", Strategy(2))) == ()


def test_the_commands_print_rates_and_times(capsys):
    assert main(["doctor", "--rates", "--ranks", "1"]) == 0
    out = capsys.readouterr().out
    for word in ("memory copy", "loopback", "disk read", "AdamW", "elements/s"):
        assert word in out
    asked = "measure --stage 1 --ranks 1 --offload optimizer=disk --time"
    assert main(asked.split()) == 0
    out = capsys.readouterr().out
    assert "plain" in out and "delayed" in out and "stream" not in out.split("schedule")[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("measure --stage 2 --ranks 1 --time", "--time needs --offload"),
        ("measure --stage 3 --ranks 1 --offload parameters=cpu --time", "leave parameters"),
        ("measure --stage 2 --ranks 1 --offload optimizer=cpu --steps 0", "at least 1"),
        ("measure --stage 2 --ranks 1 --offload schedule=delayed --steps 1", "at least 2"),
        (
            "measure --stage 2 --ranks 1 --offload optimizer=disk --offload-folder no-such-folder",
            "no-such-folder is no folder",
        ),
        ("train --stage 0 --offload optimizer=cpu", "stage 0 shards nothing"),
    ],
)
def test_what_makes_no_sense_gets_one_sentence(capsys, line, words):
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
