"""Ranks where the system lacks what Windows lacks, as far as Linux can play that.

tests/pretended_windows says what is played and what is not. Real Windows was never tried.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zerolab.cli import main
from zerolab.practice import doctor
from zerolab.practice.launcher import host, launch, system

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the real one")
PRETENDED = Path(__file__).parent / "pretended_windows"
LIMIT_S = 800  # decides nothing: a test that needs it has failed


def start(*arguments, **environ):
    """Start Python where zerolab believes in Windows."""
    names = ("ZEROLAB_START_METHOD", "RANK", "WORLD_SIZE")
    env = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("PYTEST")}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=env | {"PYTHONPATH": str(PRETENDED)} | environ,
    )


def output_of(*arguments, **environ):
    process = start(*arguments, **environ)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def seen():
    """What one session with a World of two ranks saw."""
    return json.loads(output_of(str(PRETENDED / "session.py")).splitlines()[-1])


def test_the_notebook_and_its_ranks_see_no_linux_and_are_spawned(seen):
    windows = ["win32", "spawn", [False] * 4]
    assert seen["lacking"] == windows
    assert seen["on a rank"] == [windows] * 2


def test_a_cells_function_runs_on_each_rank_and_they_agree_on_a_sum(seen):
    assert seen["sum"] == [[3.0] * 5] * 2


def test_what_ranks_print_is_labelled_in_order_and_cut_off(seen):
    *lines, long, cut = seen["printed"]
    assert lines == [f"[rank {r}] {word} of {r}" for r in range(2) for word in ("first", "Ψ")]
    assert long == "[rank 1] " + "x" * 71
    bytes_printed = len("first of 1\nΨ of 1\n".encode()) + 3_000_001
    assert cut.startswith(f"[rank 1] ({bytes_printed - launch.OUTPUT_LIMIT_BYTES:,} more bytes")


def test_a_raise_shows_the_ranks_own_traceback_and_all_processes_stay(seen):
    error, usable, same_processes = seen["raise"]
    assert error["text"] == "rank 1: LookupError: no such shard"
    assert "Cell In[3], line 4, in step\n    return how()" in error["shown"]
    assert "(rank 0 stopped)" in error["shown"] and "practice/" not in error["shown"]
    assert usable and same_processes


def test_a_hang_is_reported_with_stack_and_collective_and_all_processes_stay(seen):
    error, usable, same_processes = seen["hang"]
    assert error["kind"] == "RankTimeout"
    assert error["text"] == "not finished after 3 s: rank 0 done; rank 1 waiting in all_reduce #2"
    assert "rank 1: waiting in all_reduce #2 (Float [5])\n  Cell In[3], line 6" in error["shown"]
    assert "dist.all_reduce(t)  # the cell's own line" in error["shown"]
    assert usable and same_processes


def test_stop_ends_a_loop_and_keeps_the_variables(seen):
    error, kept, usable, same_processes = seen["stopped loop"]
    assert (error["kind"], error["text"]) == (
        "KeyboardInterrupt",
        "stopped: ranks 0, 1 running loop",
    )
    assert kept == [7, 7] and usable and same_processes


@pytest.mark.parametrize("case", ["stopped sleep", "circle"])
def test_ranks_that_nothing_wakes_are_named_restarted_and_usable(seen, case):
    error, usable = seen[case]
    assert error["text"].endswith("; ranks 0, 1 restarted without variables")
    assert error["shown"].count("session.py") == 2 and usable  # each one's stack


def test_a_rank_that_keeps_pythons_lock_is_named_and_replaced_alone(seen):
    error, usable = seen["lock"]
    assert "rank 1 in C code that keeps Python from answering; rank 1 restarted" in error["text"]
    assert usable and seen["kept by the other"] == [True, False]


def test_a_rank_that_ends_is_named_with_its_exit_code(seen):
    (exited, usable), (killed, usable_too) = seen["exit"], seen["killed"]
    assert exited["text"].startswith("rank 1 ended with exit code 7; rank 1 restarted")
    assert killed["text"].startswith("rank 0 was killed by SIGKILL") and usable and usable_too


def test_more_ranks_than_the_system_can_wait_for_are_refused_in_one_sentence(seen):
    assert seen["too many"]["kind"] == "ValueError"
    most = system.MOST_WAITED_FOR // host.RANK_WAITS
    assert f"40 ranks do not fit, at most {most} do:" in seen["too many"]["text"]


def test_restart_gives_new_processes_and_close_leaves_nothing(seen):
    assert seen["restarted"] == [True, True]
    assert seen["left"] == [[], False]


ORPHANS = """
    import os, time
    from zerolab import World
    def stay():
        import torch, torch.distributed as dist
        while dist.get_rank() == 0:
            pass
        if dist.get_rank() == 1:
            time.sleep(1e6)
        dist.all_reduce(torch.zeros(1))
    world = World(3)
    print(*world.run(os.getpid), world._folder, flush=True)
    world.run(stay, timeout=1000)
"""


def test_no_rank_outlives_a_killed_notebook_and_the_next_one_removes_its_folder(tmp_path):
    own = {"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""}  # where no other notebook tidies up
    process = start("-c", "if True:" + ORPHANS, **own)
    *numbers, folder = process.stdout.readline().split()
    ranks = [psutil.Process(int(n)) for n in numbers]
    before = [rank.cpu_times().user for rank in ranks]
    while ranks[0].cpu_times().user < before[0] + 0.1:  # it loops
        time.sleep(0.05)
    process.kill()
    process.wait()  # and no more is read: a rank that stays would hold the pipe open
    _, there = psutil.wait_procs(ranks, timeout=300)
    left = []
    for rank in there:
        with contextlib.suppress(psutil.NoSuchProcess):
            if rank.status() != psutil.STATUS_ZOMBIE:  # some containers collect nobody
                left.append(rank)
            rank.kill()
    process.communicate()
    assert len(ranks) == 3 and left == []
    assert os.path.isdir(folder)
    output_of("-c", "from zerolab.practice.launcher import launch; launch.make_folder()", **own)
    assert not os.path.exists(folder)


def test_measure_counts_the_same_bytes_and_finds_the_same_bits(capsys):
    measure = ["measure", "--stage", "3", "--ranks", "2"]
    *there, wire = output_of("-m", "zerolab", *measure).splitlines()
    assert main(measure) == 0
    *here, _ = capsys.readouterr().out.splitlines()
    assert there == here
    assert "derived equals counted on every rank: yes" in there
    assert "weights after 10 steps are those of one process, bit for bit: yes" in there
    assert wire.endswith(": not counted, as this system has no loopback counter")


def test_training_saves_and_resumes(tmp_path):
    train = ["-m", "zerolab", "train", "--ranks", "1", "--every", "2", "--json"]
    train += ["--checkpoint", str(tmp_path)]
    output_of(*train, "--stage", "3", "--steps", "2")
    resumed = json.loads(output_of(*train, "--stage", "2", "--steps", "4", "--resume"))
    assert resumed["steps"] == 4 and resumed["stage"] == 2


def test_the_planner_writes_to_a_file_whose_encoding_lacks_greek_letters():
    plan = ("-m", "zerolab", "plan", "--params", "7e9", "--ranks", "8", "--stage", "2", "--why")
    assert "Ψ" in output_of(*plan, PYTHONIOENCODING="utf-8")
    assert "Ψ" not in output_of(*plan, PYTHONIOENCODING="cp1252:strict")


def test_a_wait_that_stop_broke_off_is_taken_up_again():
    broken = [InterruptedError(), InterruptedError()]

    def wait(answer):
        if broken:
            raise broken.pop()
        return answer

    assert system.uninterrupted(wait, 7) == 7 and broken == []


def test_a_stop_that_broke_off_a_message_is_not_lost():
    def message():
        with launch.late_stop():
            signal.raise_signal(signal.SIGINT)
            raise InterruptedError

    with launch.stop_handler(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        message()


@pytest.mark.parametrize(("forced", "word"), [("spawn", "spawned"), ("", "forked")])
def test_doctor_says_how_ranks_are_started(monkeypatch, forced, word):
    def no_world(size):
        raise RuntimeError("not needed here")

    monkeypatch.setattr("zerolab.practice.world.World", no_world)
    monkeypatch.setenv("ZEROLAB_START_METHOD", forced)
    started = [str(line) for line in doctor.examine() if line.what == "start of ranks"]
    assert len(started) == 1 and (word in started[0] or sys.platform != "linux")


def test_the_loopback_is_found_by_its_address():
    name = system.loopback()
    assert name in psutil.net_if_addrs()
    assert system.interface_of("192.0.2.1") is None  # kept free for documentation
