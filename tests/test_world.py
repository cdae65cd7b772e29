"""A World's ranks: they answer in order, fail with their own words, come back, leave nothing."""

import contextlib
import ctypes
import gc
import glob
import linecache
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from zerolab.practice.launcher import host, launch, system
from zerolab.practice.world import RankError, RankTimeout, World

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import pytest
HANG_GUARD_S = 240.0  # decides nothing: a test that needs it has failed


# ---- what ranks run


def my_rank():
    from zerolab.practice.launcher.rank import namespace

    return namespace()["RANK"]


def keep(value):
    from zerolab.practice.launcher.rank import namespace

    namespace()["kept"] = value


def total():
    import torch
    import torch.distributed as dist

    numbers = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(numbers)
    return numbers.tolist()


def all_reduce_except(absent, how):
    """Every rank but one waits in an all_reduce; that one fails in some way, or just returns."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() != absent:
        dist.all_reduce(torch.zeros(5))
    else:
        how()


def fail():
    raise LookupError("no such shard")


# ---- helpers


def pids(world):
    return world.run(os.getpid)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(numbers):
    """Wait until none of these processes is left; return those that stay."""
    until = time.monotonic() + HANG_GUARD_S
    while (left := [n for n in numbers if alive(n)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def my_zombies():
    """Return the children of this process that ended and were not collected."""
    states = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = Path(path).read_text().rpartition(")")[2].split()[:2]
            states[path] = (int(parent), state)
    return [path for path, found in states.items() if found == (os.getpid(), "Z")]


def still_works(world, before=None):
    """Say whether the ranks (the same processes as before) agree on a sum."""
    expected = [sum(range(1, world.size + 1)) * 1.0] * 3
    assert world.run(total) == [expected] * world.size
    assert before is None or pids(world) == before
    return True


def script(text, *arguments, **environ):
    """Start a Python script of its own; it prints what the test wants to know."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | environ
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )


@pytest.fixture(autouse=True)
def stop_is_heard():
    """A job in the background is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def world():
    with World(3, timeout=HANG_GUARD_S) as world:
        yield world
        assert still_works(world), "the test left the world unusable"


# ---- memory


def has_asked_for_large_pages():
    """Whether this process has, for the memory of a tensor of 64 MB; the system may lack them."""
    import torch

    held, inside = torch.zeros(16_000_000), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(address, 16) for address in found.groups())
            inside = start <= held.data_ptr() < stop
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


def large_pages_are_given_to_who_asks():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    asked = setting.exists() and "[madvise]" in setting.read_text()
    return asked and os.confstr("CS_GNU_LIBC_VERSION") >= "glibc 2.35"


@pytest.mark.skipif(
    not large_pages_are_given_to_who_asks(), reason="nobody has to ask this system, or asks in vain"
)
def test_ranks_get_large_pages_and_the_notebook_s_environment_is_as_before(world):
    assert "glibc.malloc.hugetlb" not in os.environ.get("GLIBC_TUNABLES", "")
    assert world.run(has_asked_for_large_pages) == [True] * 3


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=3", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_who_has_chosen_pages_keeps_them(monkeypatch, before, inside):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if before:
        monkeypatch.setenv("GLIBC_TUNABLES", before)
    with system.large_pages():
        assert os.environ["GLIBC_TUNABLES"] == inside
    assert os.environ.get("GLIBC_TUNABLES") == before


# ---- calls


def test_results_come_in_the_order_of_the_ranks_that_were_asked(world):
    assert world.run(my_rank) == [0, 1, 2]
    assert world.run(my_rank, ranks=[2, 0]) == [2, 0]
    assert world.run(lambda a, b: a - b, 5, b=3) == [2, 2, 2]


def test_variables_stay_from_call_to_call_and_inspect_reads_them(world):
    world.run(keep, "here", ranks=[1])
    assert world.inspect("RANK, WORLD_SIZE") == [(0, 3), (1, 3), (2, 3)]
    assert world.inspect("kept", ranks=[1]) == ["here"]
    with pytest.raises(RankError, match="rank 0: NameError: name 'kept'"):
        world.inspect("kept")
    world.restart()
    with pytest.raises(RankError, match="NameError"):
        world.inspect("kept", ranks=[1])


def test_tensors_return_by_value(world):
    import torch

    results = world.run(lambda: torch.arange(4) * my_rank())
    assert [r.tolist() for r in results] == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 2, 4, 6]]


def test_output_is_labelled_and_in_rank_order_even_if_rank_0_prints_last(world, capfd):
    def talk():
        import torch.distributed as dist

        for turn in reversed(range(3)):
            if dist.get_rank() == turn:
                print(f"first of {turn}\nsecond")
                os.system("echo from a child")
            dist.barrier()

    world.run(talk)
    lines = capfd.readouterr().out.splitlines()
    texts = [["first of 0", "second"], ["first of 1", "second"], ["first of 2", "second"]]
    expected = [f"[rank {r}] {t}" for r in range(3) for t in [*texts[r], "from a child"]]
    assert lines == expected


def test_a_rank_that_prints_without_end_is_cut_off_with_a_sentence(world, capfd):
    world.run(lambda: print("x" * 3_000_000), ranks=[1])
    out = capfd.readouterr().out
    assert len(out) < 1_100_000
    assert "[rank 1] (2,000,001 more bytes were printed; only the first are kept)" in out


def test_torchs_deprecation_warnings_are_not_shown(world, capfd):
    def gather():
        import warnings

        import torch
        import torch.distributed as dist

        dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(1))
        warnings.warn("gone soon", FutureWarning, stacklevel=1)

    world.run(gather)
    assert capfd.readouterr().out == ""


# ---- errors


def test_a_failing_rank_frees_the_others_and_shows_its_own_traceback_only(world):
    before = pids(world)
    world.run(keep, "kept")
    with pytest.raises(RankError) as caught:
        world.run(all_reduce_except, 1, fail)
    assert str(caught.value) == "rank 1: LookupError: no such shard"
    assert caught.value.rank == 1
    assert 'raise LookupError("no such shard")' in caught.value.where  # the source line
    assert "in all_reduce_except" in caught.value.where and "in fail" in caught.value.where
    for machinery in ("practice/", "multiprocessing", "cloudpickle"):
        assert machinery not in caught.value.where
    assert "ranks 0, 2 stopped" in caught.value.where
    shown = "\n".join(caught.value._render_traceback_())
    assert shown.endswith("RankError: rank 1: LookupError: no such shard")
    assert world.inspect("kept") == ["kept"] * 3
    assert still_works(world, before)


def test_an_error_in_a_cells_function_shows_the_cells_own_line(world, every_failure):
    source = "def step(x):\n    y = x + 1\n    return y / 0  # by design\n"
    linecache.cache["<cell 7>"] = (len(source), None, source.splitlines(True), "<cell 7>")
    cell = {"__name__": "__main__"}
    exec(compile(source, "<cell 7>", "exec"), cell)
    with pytest.raises(RankError, match="rank 0: ZeroDivisionError") as caught:
        world.run(cell["step"], 1)
    where = caught.value.where
    assert 'File "<cell 7>", line 3, in step\n    return y / 0  # by design' in where
    assert "(ranks 1, 2 failed too)" in where
    assert where.count("File ") == 1


def test_an_error_says_which_error_it_came_from(world, every_failure):
    def chain():
        try:
            fail()
        except LookupError as error:
            raise ValueError("second") from error

    with pytest.raises(RankError, match="rank 0: ValueError: second") as caught:
        world.run(chain)
    where = caught.value.where
    parts = ["LookupError: no such shard", "the direct cause of the next one", "ValueError: second"]
    assert [where.find(p) for p in parts] == sorted(where.find(p) for p in parts)
    assert all(p in where for p in parts)


def test_of_a_recursion_without_end_the_first_and_the_last_calls_are_shown(world, every_failure):
    def again(n):
        return again(n + 1)

    with pytest.raises(RankError, match="rank 0: RecursionError") as caught:
        world.run(again, 0)
    shown = caught.value.where.splitlines()
    assert len(shown) < 150
    (gap,) = [line for line in shown if "more calls" in line]
    assert int(gap.strip(" (").split()[0]) + sum(", in again" in line for line in shown) > 900
    assert ", in again" in shown[shown.index(gap) - 2] + shown[shown.index(gap) + 1]


def test_a_rank_that_only_lost_its_neighbour_is_not_blamed_before_the_neighbour_is_heard(world):
    def lets_go():
        import torch
        import torch.distributed as dist

        if my_rank() == 1:
            dist.destroy_process_group()
            time.sleep(0.6)
            fail()
        dist.recv(torch.zeros(1), 1)

    with pytest.raises(RankError, match="rank 1: LookupError: no such shard"):
        world.run(lets_go)


def test_ranks_that_stand_aside_are_freed_too_when_one_fails(world):
    before = pids(world)

    def loop_or_fail():
        if my_rank() == 2:
            fail()
        while True:
            time.sleep(0.01)

    with pytest.raises(RankError, match="rank 2: LookupError"):
        world.run(loop_or_fail, timeout=1e6)  # so it is the failure that ends the call
    assert still_works(world, before)


def test_a_skipped_collective_is_reported_with_stacks_and_what_is_pending(world):
    before = pids(world)
    world.run(keep, 1)
    with pytest.raises(RankTimeout) as caught:
        world.run(all_reduce_except, 0, int, timeout=2)
    error = caught.value
    assert str(error) == (
        "not finished after 2 s: rank 0 done; ranks 1, 2 waiting in all_reduce #1"
    )
    assert isinstance(error, RankError) and error.report == error.where
    assert error.report.count("waiting in all_reduce #1 (Float [5])") == 2
    assert error.report.count("dist.all_reduce(torch.zeros(5))") == 2  # the source line
    assert "multiprocessing" not in error.report and "practice/" not in error.report
    assert world.inspect("kept") == [1, 1, 1]
    assert still_works(world, before)


def test_ranks_that_all_wait_for_one_another_are_freed_and_kept(world):
    def circle():
        import torch
        import torch.distributed as dist

        dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 3)

    before = pids(world)
    with pytest.raises(RankTimeout):
        world.run(circle, timeout=0.5)
    assert still_works(world, before)


def test_a_rank_that_keeps_pythons_lock_is_still_reported_and_replaced(world):
    def hold():
        if my_rank() == 1:
            import re

            re.match(r"(a+)+$", "a" * 64 + "b")  # takes ages inside C

    before = pids(world)
    with pytest.raises(RankTimeout, match="rank 1 restarted without variables") as caught:
        world.run(hold, timeout=0.5)
    assert "in hold" in caught.value.report and "practice" not in caught.value.report
    after = pids(world)
    assert (after[0], after[2]) == (before[0], before[2]) and after[1] != before[1]


def test_where_says_that_idle_ranks_run_nothing(world):
    assert world.where() == "".join(f"rank {r}: done\n" for r in range(3))
    assert world.where(ranks=[2]) == "rank 2: done\n"


def test_where_looks_at_a_call_that_another_thread_made(world, tmp_path):
    results, running, go = [], str(tmp_path / "running"), str(tmp_path / "go")

    def mark_and_wait():  # with nothing but C below it: a look may come at any moment
        rank = my_rank()
        os.close(os.open(f"{running}{rank}", os.O_CREAT))
        while not os.access(go, os.F_OK):
            time.sleep(0.01)
        return rank

    thread = threading.Thread(target=lambda: results.append(world.run(mark_and_wait)))
    thread.start()
    while len(list(tmp_path.iterdir())) < 3 and thread.is_alive():
        time.sleep(0.01)
    report = world.where()
    (tmp_path / "go").touch()
    thread.join()
    assert report.count("running mark_and_wait") == 3
    assert results == [[0, 1, 2]]


@pytest.mark.parametrize("mistake", ["shape", "dtype", "operation"])
def test_with_check_a_mismatch_is_an_error_and_not_a_hang(mistake):
    def mismatch(mistake):
        import torch
        import torch.distributed as dist

        odd = dist.get_rank() == 1
        size = 5 if odd and mistake == "shape" else 4
        dtype = torch.float64 if odd and mistake == "dtype" else torch.float32
        if odd and mistake == "operation":
            dist.broadcast(torch.zeros(size, dtype=dtype), 0)
        else:
            dist.all_reduce(torch.zeros(size, dtype=dtype))

    with World(2, check=True, timeout=HANG_GUARD_S) as world:
        with pytest.raises(RankError, match=r"Detected mismatch between collectives"):
            world.run(mismatch, mistake)
        assert still_works(world)


# ---- Stop


def wait_in_collective():
    all_reduce_except(0, lambda: time.sleep(1e6))


def wait_in_loop():
    while True:
        pass


def wait_in_sleep():
    time.sleep(1e6)


def wait_while_something_dies():
    class Slow:
        def __del__(self):  # where Python says what was raised, and goes on
            until = time.monotonic() + 2
            while time.monotonic() < until:
                pass

    Slow()
    while True:
        time.sleep(0.01)


@contextlib.contextmanager
def stop_when(path):
    """Press Stop as soon as a file is there."""

    def press():
        until = time.monotonic() + HANG_GUARD_S
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(
    "wait", [wait_in_collective, wait_in_loop, wait_in_sleep, wait_while_something_dies]
)
def test_stop_ends_the_call_and_keeps_ranks_and_variables(world, wait, tmp_path, capsys):
    before = pids(world)
    world.run(keep, 7)

    def mark_and_wait():
        if my_rank() == 1:
            (tmp_path / "running").touch()
        wait()

    with (
        pytest.raises(KeyboardInterrupt, match=r"^stopped: .*rank") as caught,
        stop_when(tmp_path / "running"),
    ):
        world.run(mark_and_wait)
    shown = "\n".join(caught.value._render_traceback_())
    assert wait.__name__ in shown and "restarted" not in shown
    assert "ignored" not in "".join(capsys.readouterr())
    assert world.inspect("kept") == [7, 7, 7]
    assert still_works(world, before)


def test_stop_reaches_ranks_that_have_not_yet_begun_the_call(world, monkeypatch):
    before = pids(world)

    def stop_at_once(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    for _ in range(20):
        monkeypatch.setattr(world, "_collect", stop_at_once)
        with pytest.raises(KeyboardInterrupt):
            world.run(wait_in_sleep)
    assert still_works(world, before)


def test_stop_waits_for_a_message_to_end_unless_it_is_pressed_twice():
    steps = []

    def message(presses):
        with launch.late_stop():
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            steps.append("ended")

    with pytest.raises(KeyboardInterrupt):
        message(1)
    assert steps == ["ended"]
    with pytest.raises(KeyboardInterrupt):
        message(2)
    assert steps == ["ended"]
    message(0)


def test_a_rank_that_swallows_stop_is_restarted_and_named(world, tmp_path):
    def stubborn():
        if my_rank() == 2:
            (tmp_path / "running").touch()
            while True:
                with contextlib.suppress(BaseException):
                    while True:
                        time.sleep(0.01)

    before = pids(world)
    with (
        pytest.raises(KeyboardInterrupt, match="rank 2 restarted without variables"),
        stop_when(tmp_path / "running"),
    ):
        world.run(stubborn)
    after = pids(world)
    assert after[:2] == before[:2] and after[2] != before[2]


def test_stop_during_a_start_leaves_nothing_and_the_next_start_works(monkeypatch):
    started = []

    def start_then_stop(setup):
        link = launch_rank(setup)
        started.append(link.process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # the signal is taken here at the latest
        return link

    launch_rank = launch.start_rank
    folders = set(my_folders())
    monkeypatch.setattr(launch, "start_rank", start_then_stop)
    with pytest.raises(KeyboardInterrupt, match="stopped before the ranks were ready"):
        World(2)
    monkeypatch.undo()
    assert len(started) == 1 and gone(started) == []
    assert set(my_folders()) == folders
    with World(2) as world:
        assert still_works(world)


def test_stop_while_the_ranks_server_begins_is_for_the_notebook(monkeypatch):
    heard = []
    begin = "multiprocessing.forkserver.ensure_running"
    monkeypatch.setattr(begin, lambda: heard.append(signal.getsignal(signal.SIGINT)))
    launch.start_server()
    assert heard == [signal.SIG_IGN], "what a new program inherits"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stop_while_nothing_runs_does_not_reach_the_ranks(world):
    before = pids(world)

    def press():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(HANG_GUARD_S)

    with pytest.raises(KeyboardInterrupt):
        press()
    assert still_works(world, before)


# ---- ranks that end


def test_a_rank_that_ends_is_named_and_restarted_alone(world):
    before = pids(world)
    world.run(keep, 5)
    with pytest.raises(RankError) as caught:
        world.run(all_reduce_except, 1, lambda: os._exit(7))
    assert str(caught.value) == "rank 1 ended with exit code 7; rank 1 restarted without variables"
    assert caught.value.rank == 1
    assert world.inspect("kept", ranks=[0, 2]) == [5, 5]
    after = pids(world)
    assert (after[0], after[2]) == (before[0], before[2]) and after[1] != before[1]


def test_a_rank_killed_between_two_calls_is_named_before_anything_runs(world):
    os.kill(pids(world)[2], signal.SIGKILL)
    assert gone([pids_of(world)[2]]) == []
    with pytest.raises(RankError, match=r"^rank 2 was killed by SIGKILL .*; rank 2 restarted"):
        world.run(my_rank)
    assert world.run(my_rank) == [0, 1, 2]


def pids_of(world):
    return [link.process.pid for link in world._links.values()]


def test_a_rank_that_calls_exit_stays_and_is_named(world):
    before = pids(world)
    with pytest.raises(RankError, match=r"^rank 2 called exit with code 3: .*return"):
        world.run(all_reduce_except, 2, lambda: sys.exit(3))
    assert still_works(world, before)


def test_a_segmentation_fault_says_what_most_likely_was_read():
    from zerolab.practice.launcher.report import exit_text

    text = "was killed by SIGSEGV (exit code -11): perhaps it read a parameter that stage 3 keeps "
    assert exit_text(-signal.SIGSEGV) == text + "in memory only while it is used"
    assert exit_text(-signal.SIGABRT) == "was killed by SIGABRT (exit code -6)"


def test_many_raises_and_hangs_leave_the_same_processes(world):
    before = pids(world)
    for i in range(20):
        with pytest.raises(RankError, match="LookupError"):
            world.run(all_reduce_except, i % 3, fail)
    for i in range(10):
        with pytest.raises(RankTimeout, match="waiting in all_reduce #1"):
            world.run(all_reduce_except, i % 3, int, timeout=0.5)
    assert still_works(world, before)
    assert my_zombies() == []


# ---- input that makes no sense


def generator():
    yield


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda w: World(0), ValueError, "size must be at least 1"),
        (lambda w: World("4"), TypeError, "size must be a whole number, .*not '4'"),
        (lambda w: World(2.5), TypeError, "whole number, .*not 2.5"),
        (lambda w: World(True), TypeError, "whole number"),
        (lambda w: World(10**6), ValueError, r"1000000 ranks do not fit, at most \d+ do"),
        (lambda w: World(2, timeout=0), ValueError, "timeout must be a number of seconds above 0"),
        (lambda w: World(2, threads=0), ValueError, "threads must be at least 1"),
        (lambda w: World(2, backend="mpi"), ValueError, "'auto', 'gloo' or 'nccl'"),
        (lambda w: w.run(7), TypeError, "run takes a function, .*not 7"),
        (lambda w: w.run(my_rank, timeout=-1), ValueError, "above 0, not -1"),
        (lambda w: w.run(my_rank, ranks=[7]), ValueError, r"numbers from 0 to 2, not \[7\]"),
        (lambda w: w.run(my_rank, ranks=[-1]), ValueError, "from 0 to 2"),
        (lambda w: w.run(my_rank, ranks=[]), ValueError, "from 0 to 2"),
        (lambda w: w.run(my_rank, ranks=[1, 1]), ValueError, "different"),
        (lambda w: w.run(my_rank, ranks=1), ValueError, "must be a list"),
        (lambda w: w.run(print, threading.Lock()), TypeError, "print cannot be sent .*lock"),
        (lambda w: w.run(print, generator()), TypeError, "print cannot be sent .*generator"),
        (
            lambda w: w.run(print, os.fdopen(os.dup(2), "w")),
            TypeError,
            "print cannot be sent .*file",
        ),
        (lambda w: w.run(lambda: w), TypeError, "a World stays in the notebook"),
        (lambda w: w.inspect(3), TypeError, "inspect takes text"),
        (lambda w: w.run(generator), RankError, "rank 0 gave back a generator, which cannot"),
        (lambda w: w.run(lambda: World(2)), RankError, "a rank cannot make a World"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(world, every_failure, act, kind, words):
    with pytest.raises(kind, match=words) as caught:
        act(world)
    shown = caught.value._render_traceback_()
    assert "\n" not in str(caught.value)
    if kind is not RankError:
        assert shown == [f"{kind.__name__}: {caught.value}"]


def test_too_many_ranks_are_refused_with_the_number_that_fits(monkeypatch):
    World(1).close()  # the ranks' server has its memory by now
    monkeypatch.setattr(host, "SERVER_BYTES", 0)
    for free, words in (
        (200_000_000, r"4 ranks do not fit, at most 2 do: they need about 0.27 GB .* 0.20 GB are"),
        (20_000_000, r"4 ranks do not fit, not even one does: .* 0.02 GB are free; close other"),
    ):
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free)
        with pytest.raises(ValueError, match=words):
            World(4)


def test_where_the_loopback_is_off_a_world_says_how_it_is_turned_on(monkeypatch, tmp_path):
    from zerolab.practice.launcher import group, system

    monkeypatch.setattr(system, "interface_of", lambda address: None)
    with pytest.raises(RuntimeError, match="loopback is off: turn it on, as in ip link set lo up"):
        group.join_group("gloo", False, 0, 1, str(tmp_path / "group"))


@pytest.mark.parametrize(
    ("environ", "launched"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "", "WORLD_SIZE": ""}, False),
        ({"RANK": "first", "WORLD_SIZE": "2"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "two"}, False),
    ],
)
def test_variables_that_no_launcher_sets_make_no_launcher(monkeypatch, environ, launched):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launch.launched() == launched


def test_a_launchers_ranks_are_not_emulated(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="not emulated: leave device_memory, link away"):
        World(1, device_memory="1 MB", link=5e6, latency=None)


def test_a_closed_world_says_so_and_closing_twice_is_fine():
    world = World(1)
    assert repr(world) == "World(1)"
    world.close()
    world.close()
    for use in (lambda: world.run(my_rank), world.where, world.restart, lambda: world.inspect("1")):
        with pytest.raises(RuntimeError, match="this world is closed: make a new one"):
            use()
    assert repr(world) == "World(1), closed"


# ---- nothing is left behind


def my_folders():
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/nowhere")
    places = [runtime, tempfile.gettempdir()]
    return [f for place in places for f in glob.glob(f"{place}/zerolab-*-{os.getpid()}-*/world-*")]


def test_close_and_a_forgotten_world_leave_no_process_and_no_folder():
    first, second = World(2), World(2)
    numbers = pids(first) + pids(second)
    folders = [first._folder, second._folder]
    assert [os.stat(f).st_mode & 0o777 for f in folders] == [0o700, 0o700]
    first.close()
    del second
    gc.collect()
    assert gone(numbers) == []
    assert not any(map(os.path.exists, folders))
    assert my_zombies() == []


PARENT = """
    import os, sys, time
    from zerolab.practice.world import World
    def stay(rank_holding_the_lock):
        import re, torch, torch.distributed as dist
        if dist.get_rank() == 0:
            time.sleep(1e6)
        if dist.get_rank() == rank_holding_the_lock:
            re.match(r"(a+)+$", "a" * 64 + "b")
        dist.all_reduce(torch.zeros(1))
    world = World(3)
    print(*world.run(os.getpid), world._folder, flush=True)
    world.run(stay, 2, timeout=1000)
"""


def test_no_rank_outlives_a_killed_notebook_and_its_folder_goes_with_the_last():
    process = script(PARENT)
    *numbers, folder = process.stdout.readline().split()
    assert len(numbers) == 3 and all(alive(n) for n in numbers)
    process.kill()
    process.wait()
    assert gone(numbers) == []
    until = time.monotonic() + HANG_GUARD_S
    while os.path.exists(folder) and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(folder)


def test_a_script_without_a_main_guard_runs_once_and_ends_cleanly(tmp_path):
    (tmp_path / "lesson.py").write_text(
        "import os\n"
        "from zerolab.practice.world import World\n"
        "print('once')\n"
        "world = World(2)\n"
        "print(*world.run(os.getpid), world._folder)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "lesson.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out = process.communicate(timeout=HANG_GUARD_S)[0].split()
    assert process.returncode == 0 and out.count("once") == 1 and len(out) == 4
    assert gone(out[1:3]) == [] and not os.path.exists(out[3])


def test_three_worlds_at_once_do_not_meet():
    worlds = [World(2, timeout=HANG_GUARD_S) for _ in range(3)]
    try:
        for i, w in enumerate(worlds):
            w.run(keep, i)
        with pytest.raises(RankError):
            worlds[1].run(all_reduce_except, 0, fail)
        assert [w.inspect("kept") for w in worlds] == [[0, 0], [1, 1], [2, 2]]
        assert all(still_works(w) for w in worlds)
        assert len({n for w in worlds for n in pids(w)}) == 6
    finally:
        for w in worlds:
            w.close()


def listening():
    """Return the addresses that this rank listens on, over TCP, as the kernel writes them."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            found.append((local.split(":")[0], state, rest[5]))
    inodes = {os.readlink(fd) for fd in glob.glob("/proc/self/fd/*") if os.path.islink(fd)}
    return [a for a, state, inode in found if state == "0A" and f"socket:[{inode}]" in inodes]


def test_gloo_listens_on_the_loopback_only_and_nothing_else_listens(world):
    assert [set(a) for a in world.run(listening)] == [{"0100007F"}] * 3
    allowed = (
        shutil.which("unshare") and subprocess.run(["unshare", "-Urn", "true"]).returncode == 0
    )
    assert world.private_ports or not allowed
    if world.private_ports:
        networks = world.run(lambda: os.readlink("/proc/self/ns/net"))
        assert len(set(networks)) == 1 and networks[0] != os.readlink("/proc/self/ns/net")


def test_the_notebook_does_not_load_torch_to_run_ranks():
    process = script(
        """
        import sys
        from zerolab.practice.world import World
        with World(2) as world:
            world.run(print, 1)
        print("torch" in sys.modules)
        """
    )
    assert process.communicate(timeout=HANG_GUARD_S)[0].splitlines()[-1] == "False"


# ---- other ways to start


def test_spawned_ranks_behave_the_same(monkeypatch):
    monkeypatch.setenv("ZEROLAB_START_METHOD", "spawn")
    with World(2, timeout=HANG_GUARD_S) as world:
        numbers = pids(world)
        assert not world.private_ports
        assert [set(a) for a in world.run(listening)] == [{"0100007F"}] * 2
        with pytest.raises(RankError, match="rank 1: LookupError"):
            world.run(all_reduce_except, 1, fail)
        assert still_works(world, numbers)
    assert gone(numbers) == [] and my_zombies() == []


LESSON = """
    import os, sys
    from zerolab.practice.launcher.rank import namespace
    from zerolab.practice.world import World
    def work(x):
        import torch, torch.distributed as dist
        t = torch.tensor([float(dist.get_rank() + x)])
        dist.all_reduce(t)
        namespace()["t"] = t.item()
        return t.item(), dist.get_rank()
    with World(int(sys.argv[1])) as world:
        print(world.run(work, 1), world.run(work, 1, ranks=[0, 1]), world.inspect("t"), flush=True)
    os._exit(0)  # the rest of torch may abort as the interpreter ends
"""


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_file_attaches_to_a_launchers_ranks(launcher, size, free_port):
    processes = []
    for r in range(2):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if launcher == "srun":
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        given = dict(zip(names, (str(r), "2", str(r)), strict=True))
        processes.append(
            script(LESSON, str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port), **given)
        )
    outs = [p.communicate(timeout=HANG_GUARD_S)[0] for p in processes]
    result = "[(3.0, 0), (3.0, 1)] [(3.0, 0), (3.0, 1)] [3.0, 3.0]\n"
    sentence = "World(4) asks for 4 ranks; the launcher gave 2. They are used.\n"
    assert outs == [(sentence if size == 4 else "") + result, result]


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- in a notebook


SUMMING_CELL = """%%ranks
import torch, torch.distributed as dist
x = torch.ones(2) * RANK
dist.all_reduce(x)
x"""
FAILING_CELL = """def step():
    import torch.distributed as dist
    if dist.get_rank() == 1:
        raise ValueError('from a cell')
    dist.barrier()
world.run(step)"""


def test_a_notebook_runs_cells_on_ranks_and_shows_only_the_ranks_own_frames():
    import nbformat

    from zerolab.course import derive

    cells = [
        "%load_ext zerolab",
        "%%ranks\nRANK",
        "from zerolab import World\nworld = World(3)",
        SUMMING_CELL,
        "%%ranks [0 2]\nprint(RANK, WORLD_SIZE)",
        FAILING_CELL,
        "%%ranks\ny = 1\nz = RANK / 0",
        "%%ranks 0 9\n1",
        "world.run(lambda: None, ranks=[5])",
        "world.inspect('x.tolist()')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    derive.Client(
        notebook, timeout=300, iopub_timeout=60, startup_timeout=300, kernel_name="python3",
        allow_errors=True,
    ).execute()  # fmt: skip

    def shown(i):
        output = notebook.cells[i].outputs[0]
        text = output.get("text") or output.get("data", {}).get("text/plain")
        return text or output["traceback"]

    no_world = "RuntimeError: there is no world yet: make one first, as in world = World(4)"
    assert shown(1) == [no_world]
    assert shown(3) == "".join(f"[rank {r}] tensor([3., 3.])\n" for r in range(3))
    assert shown(4) == "[rank 0] 0 3\n[rank 2] 2 3\n"
    assert shown(5) == [
        "rank 1, last call below:",
        "  Cell In[6], line 4, in step",
        "    raise ValueError('from a cell')",
        "ValueError: from a cell",
        "(ranks 0, 2 stopped)",
        "RankError: rank 1: ValueError: from a cell",
    ]
    assert shown(6)[1:3] == ["  Cell In[7], line 3, in <module>", "    z = RANK / 0"]
    assert shown(7) == ["ValueError: %%ranks takes numbers from 0 to 2, as in %%ranks 0, not '0 9'"]
    assert len(shown(8)) == 1
    assert shown(9) == "[[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]"


def faults_of_coming_and_going():
    """Pages the system hands this rank in the later 20 of 40 rounds of three 12 MB buffers."""
    import resource

    import torch

    faults = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            kept = [torch.ones(3_000_000) for _ in range(3)]
            del kept
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults[1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
def test_memory_that_comes_and_goes_in_every_step_stays_with_the_rank(world):
    one_round = 3 * 12_000_000 / mmap.PAGESIZE
    assert max(world.run(faults_of_coming_and_going)) < one_round
