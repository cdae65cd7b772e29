"""What a stranger's cells see, reach and use: nothing but their own corner of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zerolab.course import kept
from zerolab.course.grading import classroom, sandbox
from zerolab.course.grading.judging import Clock, Failed, Gone, Notebook
from zerolab.course.grading.sandbox import Limits

ROOT = Path(__file__).resolve().parent.parent
SMALL = Limits(memory_bytes=2**30, processes=24, disk_bytes=32 * 2**20)

pytestmark = pytest.mark.skipif(
    bool(sandbox.trusted_only()), reason=f"no sandbox here: {sandbox.trusted_only()}"
)


@pytest.fixture(scope="module")
def notebook():
    with Notebook("ada", SMALL) as one:
        yield one


@pytest.fixture
def fresh():
    with Notebook("ada", SMALL) as one:
        yield one


def value(notebook, expression):
    header, blobs = notebook._ask({"do": "answer", "source": expression}, within_s=15.0)
    return notebook._read(header, blobs)


@pytest.mark.parametrize("name", ["solutions", "lessons", "tests", ".git", "README.md"])
def test_it_sees_nothing_of_the_checkout_but_the_package(notebook, name):
    assert (ROOT / name).exists()
    assert value(notebook, f"__import__('os').path.exists({str(ROOT / name)!r})") is False


def test_it_sees_nobody_s_files(notebook, tmp_path):
    (tmp_path / "other.ipynb").write_text("{}")
    assert value(notebook, f"__import__('os').path.exists({str(tmp_path)!r})") is False


def test_it_sees_the_package_without_its_keys(notebook):
    checks = ROOT / "zerolab" / "course" / "checks"
    assert value(notebook, f"__import__('os').listdir({str(checks)!r})") == []
    assert value(notebook, f"__import__('os').listdir({str(ROOT)!r})").count("zerolab") == 1
    with pytest.raises(Failed, match="ModuleNotFoundError"):
        notebook.run("import zerolab.course.checks.lesson05")


def test_it_sees_no_process_but_its_own(notebook):
    pids = value(notebook, "[p for p in __import__('os').listdir('/proc') if p.isdigit()]")
    assert len(pids) <= 3


def test_it_is_nobody_and_stays_nobody(notebook):
    assert value(notebook, "__import__('os').getuid()") != 0
    with pytest.raises(Failed, match="PermissionError"):
        notebook.run("import os\nos.setuid(0)")


@pytest.mark.parametrize("path", ["/usr/x", "/etc/x", "/x", str(ROOT / "zerolab" / "x.py")])
def test_it_writes_nowhere_but_in_its_own_folder(notebook, path):
    with pytest.raises(Failed, match=r"Read-only|Permission"):
        notebook.run(f"open({path!r}, 'w')")
    notebook.run("open('mine', 'w').write('x')")


def test_it_reaches_no_network_but_a_loopback_of_its_own(notebook, free_port_with_a_listener):
    for host, port in (("127.0.0.1", free_port_with_a_listener), ("192.0.2.1", 80)):
        with pytest.raises(Failed, match=r"OSError|ConnectionRefused"):
            notebook.run(f"import socket\nsocket.create_connection(('{host}', {port}), 2)")
    notebook.run(
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(s.getsockname(), 2).close()"
    )


@pytest.fixture
def free_port_with_a_listener():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_it_cannot_make_a_namespace_of_its_own(notebook):
    with pytest.raises(Failed, match=r"subprocess|CalledProcessError"):
        notebook.run("import subprocess\nsubprocess.run(['unshare', '-Ur', 'true'], check=True)")


def test_its_disk_is_small(notebook):
    with pytest.raises(Failed, match=r"No space left|File too large"):
        notebook.run("for i in range(99): open(f'/tmp/{i}', 'wb').write(b'0' * 2**20)")
    notebook.run("import shutil, glob, os\nfor f in glob.glob('/tmp/[0-9]*'): os.remove(f)")


def test_its_memory_is_limited(notebook):
    with pytest.raises(Failed, match="MemoryError"):
        notebook.run("x = bytearray(4 * 2**30)")


def test_memory_of_many_processes_together_is_limited(fresh):
    hog = "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        "
    hog += "x = b'1' * (600 * 2**20)\n        time.sleep(60)\n        os._exit(0)\ntime.sleep(60)"
    with pytest.raises(Gone, match="GiB of memory"):
        fresh.run(hog)


def test_memory_that_many_processes_share_counts_once(notebook):
    shared = "import os, time\nx = b'1' * (300 * 2**20)\nfor _ in range(4):\n"
    shared += "    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n"
    notebook.run(shared + "for _ in range(4): os.wait()\ndel x")
    assert not notebook._cells.killed_for


def test_it_waits_as_long_as_the_grader_is_told_to(notebook):
    name = kept.PATIENCE
    assert value(notebook, f"__import__('os').environ[{name!r}]") == os.environ[name]


@pytest.mark.parametrize(
    "call", ["os.memfd_create('x')", "checked(libc.shmget(0, 4096, 0o1600))"], ids=["memfd", "shm"]
)
def test_memory_that_no_process_is_seen_to_hold_is_refused(notebook, call):
    notebook.run(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def checked(got):\n    if got < 0: raise OSError(ctypes.get_errno(), 'refused')"
    )
    with pytest.raises(Failed, match=r"Errno 38"):
        notebook.run(call)


def test_a_judge_that_is_busy_with_one_number_is_ended():
    code = "from zerolab.course.grading import worker\nworker.JUDGE_S = 0.3\n"
    code += "worker._wind_up()\n10 ** 10**9"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGPROF


def test_a_notebook_has_seconds_for_all_of_its_cells_together(monkeypatch):
    clock = Clock(0.4)
    with Notebook("ada", SMALL, Clock()) as one:
        one.clock = clock
        monkeypatch.setenv(kept.PATIENCE, "2")  # on a slow machine
        with pytest.raises(Gone, match="used up all its 90 seconds"):
            sleep_often(one)
        assert clock.left_s <= 0


def sleep_often(notebook):
    for _ in range(30):
        notebook.run("import time\ntime.sleep(0.3)")


def test_a_world_of_three_starts_beside_one_of_four():
    with Notebook("ada", Limits()) as one:
        one._ask({"do": "run", "source": "def f(): return None"}, within_s=15.0)
        header, blobs = one._ask({"do": "answer", "source": "f"}, within_s=15.0)
        answer = one._read(header, blobs)
        for size in (4, 3):
            assert one.run_on_ranks(_call, (answer,), None, size, None) == [None] * size


def _call(function):
    import threading
    import time

    for _ in range(4):  # as torch's backward and a second group have them
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return function()


def test_who_forks_without_end_is_ended(fresh):
    with pytest.raises(Gone, match="processes"):
        fresh.run("import os\nfor _ in range(10**6):\n    os.fork()")


def test_who_ends_the_program_is_named(fresh):
    with pytest.raises(Gone, match="the program ended"):
        fresh.run("import os\nos._exit(0)")


def test_who_never_ends_is_ended_and_nothing_stays(fresh, monkeypatch):
    monkeypatch.setattr("zerolab.course.grading.judging.CELL_S", 1.0)
    pid = fresh._cells._process.pid
    with pytest.raises(Gone, match="did not end within 1 seconds"):
        fresh.run("while True: pass")
    fresh.close()
    assert not psutil.pid_exists(pid)


def test_who_sleeps_for_ever_is_ended_too(fresh, monkeypatch):
    monkeypatch.setattr("zerolab.course.grading.judging.CELL_S", 0.5)
    with pytest.raises(Gone, match="did not end"):
        fresh.run("import time\ntime.sleep(600)")


def test_prints_without_end_do_no_harm(notebook):
    notebook.run("for _ in range(100): print('x' * 10**6)")
    notebook.run(
        "import sys\nsys.stderr.write('y' * 10**7)\n__import__('os').write(1, b'z' * 10**6)"
    )
    assert value(notebook, "1 + 1") == 2


def test_an_answer_that_is_too_large_is_no_answer(fresh):
    with pytest.raises((Failed, Gone)):
        value(fresh, "'x' * (300 * 2**20)")


def test_what_it_writes_into_the_grader_s_channel_is_no_message(fresh):
    with pytest.raises(Gone, match="its answer is"):
        fresh.run(
            "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'garbage' * 9)\n"
            "    except OSError: pass"
        )  # fmt: skip


def test_closing_ends_whatever_still_runs():
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with Notebook("ada", SMALL) as one:
        one.run("import subprocess\np = subprocess.Popen(['sleep', '600'])")
        roots = set(Path(one._cells._root).parent.glob("zerolab-box-*"))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = {p.pid for p in psutil.Process().children(recursive=True)} - before
        if not left:
            break
        time.sleep(0.1)
    assert not left
    assert not [root for root in roots if str(root) == one._cells._root and root.exists()]


def test_the_learner_in_the_environment_is_the_grader_s(notebook):
    assert value(notebook, "__import__('os').environ['ZEROLAB_LEARNER']") == "ada"
    notebook.run("import zerolab\nmine = zerolab.given('13.1', 'somebody else')")
    from zerolab.course.checks import given

    assert value(notebook, "mine.params") == given("13.1", "ada").params


def test_an_environment_that_holds_the_course_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "prefix", str(ROOT))
    with pytest.raises(RuntimeError, match="holds the course itself"):
        sandbox._visible()


def test_the_lessons_are_where_they_are_looked_for():
    assert classroom.released() == ROOT / "lessons"
    assert os.path.isdir(classroom.released())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing_and_the_next_has_nothing_to_fear(tmp_path, sent):
    source = next((ROOT / "solutions").glob("05_*.ipynb"))
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / source.name).write_bytes(source.read_bytes())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "zerolab", "grade", str(tmp_path / "in"), "-j", "1"]
    out = ["--out", str(tmp_path / "grades.csv")]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command + out, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    while not list(scratch.glob("zerolab-grade-*/zerolab-box-*")) and process.poll() is None:
        time.sleep(0.1)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sent)
    process.send_signal(signal.SIGTERM)  # once more, while it tidies up
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert "stopped after 0 of 1" in said
    assert list(scratch.iterdir()) == []
    assert started and psutil.wait_procs(started, 10)[1] == []
