"""Many learners on one machine: thirty worlds at once, limits, what is left, who can reach what."""

import contextlib
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import psutil
import pytest

from zerolab.practice import doctor
from zerolab.practice.launcher import host, launch
from zerolab.practice.world import RankError, World

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(sys.platform != "linux", reason="shared hosts of the course run Linux"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import pytest
GUARD_S = 400.0  # decides nothing: a test that needs it has failed
WORLDS, RANKS = 30, 4
MOST_BYTES = 9 * 2**30  # for the thirty worlds with their learners' processes and servers
NOBODY = 65534


# ---- what ranks run


def total(own):
    """The sum over the ranks of own + rank, a thousand times: which values came."""
    import torch
    import torch.distributed as dist

    numbers = torch.full((1000,), float(own + dist.get_rank()))
    dist.all_reduce(numbers)
    return sorted(set(numbers.tolist()))


def private_bytes():
    """What this process shares with no other."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise LookupError


def use_memory(rank, num_bytes):
    import torch
    import torch.distributed as dist

    return torch.ones(num_bytes if dist.get_rank() == rank else 1, dtype=torch.uint8).numel()


# ---- helpers


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def comes_true(claim):
    """Whether it does before the guard ends; only a failing test waits that long."""
    until = time.monotonic() + GUARD_S
    while not (true := claim()) and time.monotonic() < until:
        time.sleep(0.02)
    return true


def script(text, *arguments, **environ):
    """Starts a learner's process, which is told to go on by lines, and answers with lines."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | environ
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,  # as Jupyter starts a kernel
    )


def answers(processes):
    """One line of each; whatever is no JSON was a traceback."""
    lines = [process.stdout.readline() for process in processes]
    with contextlib.suppress(json.JSONDecodeError):
        return [json.loads(line) for line in lines]
    raise AssertionError("".join(p.stdout.read() for p in processes if p.poll() is not None))


def go_on(processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def pss_bytes(pid):
    """A process's part of the memory: of a page that n processes share, an n-th."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise LookupError


def listening(pid):
    """(protocol, address) of each socket of a process that waits for strangers."""
    mine = set()
    for fd in glob.glob(f"/proc/{pid}/fd/*"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(fd))
    found = []
    for name, waits in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == waits and f"socket:[{rest[5]}]" in mine:
                found.append((name, local.split(":")[0]))
    names = {
        *Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:],
        *Path("/proc/net/unix").read_text().splitlines()[1:],
    }  # where a server was started
    for line in names:
        _, _, _, flags, _, _, inode, *path = line.split()
        if int(flags, 16) & 0x10000 and f"socket:[{inode}]" in mine:  # it accepts connections
            found.append(("unix", path[0] if path else ""))
    return found


def namespaces_are_allowed():
    tool = shutil.which("unshare")
    return bool(tool) and subprocess.run([tool, "-Urn", "true"]).returncode == 0


# ---- thirty worlds at once


LEARNER = """
    import gc, json, os, sys
    from zerolab.practice import world as limits
    from zerolab.practice.world import World
    limits.START_LIMIT_S = 600.0
    def total(own):
        import torch, torch.distributed as dist
        numbers = torch.full((1000,), float(own + dist.get_rank()))
        dist.all_reduce(numbers)
        return sorted(set(numbers.tolist()))
    def tell(**what):
        print(json.dumps(what), flush=True)
        sys.stdin.readline()
    world = World(4, timeout=600)
    tell(ranks=world.run(os.getpid), folder=world._folder, private=world.private_ports)
    sums = world.run(total, 100 * int(sys.argv[1]))
    world.run(gc.collect)
    tell(sums=sums)
    world.close()
    tell(closed=world.closed)
"""


@dataclass
class Room:
    """What was seen of thirty worlds."""

    worlds: list  # what each said when it was ready
    sums: list
    processes: dict  # process ids of each learner's processes while they lived, by learner
    pss: int
    listening: list
    left_after_close: list
    left_at_the_end: list
    codes: list


@pytest.fixture(scope="module")
def room():
    if host.free_bytes() < MOST_BYTES:
        pytest.skip(f"thirty worlds need {MOST_BYTES:,} free bytes, here are {host.free_bytes():,}")
    base = tempfile.mkdtemp()
    learners = []
    try:
        for i in range(WORLDS):
            learners.append(script(LEARNER, str(i), TMPDIR=base, XDG_RUNTIME_DIR=""))
        worlds = answers(learners)
        go_on(learners)
        sums = [said["sums"] for said in answers(learners)]
        trees = {
            p.pid: [p.pid, *(c.pid for c in psutil.Process(p.pid).children(recursive=True))]
            for p in learners
        }
        everyone = [pid for tree in trees.values() for pid in tree]
        pss = sum(map(pss_bytes, everyone))
        sockets = [socket for pid in everyone for socket in listening(pid)]
        go_on(learners)
        assert all(said["closed"] for said in answers(learners))
        folders = [said["folder"] for said in worlds]
        ranks = [pid for said in worlds for pid in said["ranks"]]
        comes_true(lambda: not any(map(alive, ranks)))
        after_close = [*filter(alive, ranks), *filter(os.path.exists, folders)]
        go_on(learners)
        codes = [learner.wait(GUARD_S) for learner in learners]
        comes_true(lambda: not any(map(alive, everyone)))
        at_the_end = [*filter(alive, everyone), *os.listdir(base)]
        yield Room(worlds, sums, trees, pss, sockets, after_close, at_the_end, codes)
    finally:
        for learner in learners:
            learner.kill()
            learner.communicate()
        shutil.rmtree(base)


def test_thirty_worlds_at_once_each_sum_their_own_numbers(room):
    expected = [[float(4 * 100 * i + 0 + 1 + 2 + 3)] for i in range(WORLDS)]
    assert room.sums == [[one] * RANKS for one in expected]


def test_thirty_worlds_fit_into_nine_gibibytes(room):
    with_server_and_tracker = RANKS + 1 + 2
    assert {len(tree) for tree in room.processes.values()} == {with_server_and_tracker}
    assert room.pss <= MOST_BYTES, f"{room.pss / 2**30:.2f} GiB"


def test_thirty_worlds_share_no_process_and_no_folder(room):
    ranks = [pid for said in room.worlds for pid in said["ranks"]]
    assert len(set(ranks)) == WORLDS * RANKS
    assert len({said["folder"] for said in room.worlds}) == WORLDS


def test_thirty_worlds_listen_on_the_loopback_and_in_private_folders_only(room):
    kinds = Counter(kind for kind, _ in room.listening)
    assert kinds == {"tcp": WORLDS * RANKS, "unix": WORLDS}  # a gloo port a rank; a server's socket
    assert {address for kind, address in room.listening if kind == "tcp"} == {"0100007F"}
    assert all("/zerolab-" in path for kind, path in room.listening if kind == "unix")
    assert {said["private"] for said in room.worlds} == {namespaces_are_allowed()}


def test_thirty_worlds_leave_no_process_and_no_folder(room):
    assert room.codes == [0] * WORLDS
    assert room.left_after_close == []
    assert room.left_at_the_end == []


def test_a_collection_of_garbage_copies_nothing_that_ranks_share():
    with World(2, timeout=GUARD_S) as world:
        before = world.run(private_bytes)
        world.run(lambda: __import__("gc").collect())
        grown = [now - then for now, then in zip(world.run(private_bytes), before, strict=True)]
    assert max(grown) < 10_000_000  # all of Python's objects are four times that


# ---- when memory or processes run out


@pytest.fixture
def control_groups(tmp_path, monkeypatch):
    """Makes a tree of control groups of either version, whose limits are real to `host` alone."""

    def make(membership, files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(host, "GROUPS", str(tmp_path))
        monkeypatch.setattr(host, "MEMBERSHIP", str(tmp_path / "membership"))

    return make


TIGHT = {
    "version 2": (
        "0::/hub/learner\n",
        {
            "hub/learner/memory.max": "max\n",
            "hub/learner/memory.current": "70000000\n",
            "hub/memory.max": "400000000\n",
            "hub/memory.current": "390000000\n",
            "hub/memory.stat": "anon 1\ninactive_file 20000000\nactive_file 7\n",
        },
    ),
    "version 1": (
        "9:name=systemd:/\n4:memory,hugetlb:/learner\n0::/\n",
        {
            "memory/learner/memory.limit_in_bytes": "400000000\n",
            "memory/learner/memory.usage_in_bytes": "390000000\n",
            "memory/learner/memory.stat": "inactive_file 1\ntotal_inactive_file 20000000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
        },
    ),
    "in a container": (  # which sees its own group as the root, under the host's name for it
        "0::/docker/1234\n",
        {
            "memory.max": "400000000\n",
            "memory.current": "390000000\n",
            "memory.stat": "inactive_file 20000000\n",
        },
    ),
}


@pytest.mark.parametrize(("membership", "files"), TIGHT.values(), ids=TIGHT)
def test_a_control_groups_limit_refuses_a_world_with_what_is_free_and_needed(
    control_groups, monkeypatch, membership, files
):
    control_groups(membership, files)
    assert host.free_bytes() == 30_000_000
    monkeypatch.setattr(host, "SERVER_BYTES", 0)  # as if it were loaded
    with pytest.raises(ValueError) as caught:
        World(4)
    assert str(caught.value) == (
        "4 ranks do not fit, not even one does: they need about 0.27 GB of memory, and 0.03 GB are "
        "free; close other worlds or shut down other kernels"
    )


def test_a_server_that_has_yet_to_load_torch_counts_as_needed(monkeypatch):
    monkeypatch.setattr(host, "free_bytes", lambda: 400_000_000)
    assert (
        host.room(4, "forkserver", None).fit
        == (400_000_000 - host.SERVER_BYTES) // host.RANK_BYTES["forkserver"]
    )
    assert host.room(4, "spawn", None).fit == 400_000_000 // host.RANK_BYTES["spawn"]
    with World(1) as world:
        world.run(int)
        from multiprocessing import forkserver

        server = forkserver._forkserver._forkserver_pid
        assert (
            host.room(4, "forkserver", server).fit == 400_000_000 // host.RANK_BYTES["forkserver"]
        )


def test_a_limit_of_processes_refuses_a_world(control_groups):
    files = {"me/pids.max": "100\n", "me/pids.current": "80\n", "pids.max": "max\n"}
    control_groups("0::/me\n", files)
    assert host.tasks_left() == 20
    words = "at most 2 do: they need about 32 more processes and threads, and 20 are allowed; make"
    with pytest.raises(ValueError, match=words):
        World(4)


@pytest.mark.parametrize(("left", "mark"), [(20, "-- "), (500, "ok ")])
def test_doctor_says_how_many_processes_a_limit_leaves(control_groups, left, mark):
    control_groups("0::/\n", {"pids.max": f"{left + 80}\n", "pids.current": "80\n"})
    said = [str(finding) for finding in doctor._processes()]
    assert len(said) == 1
    assert said[0].startswith(f"{mark} processes and threads: {left} more are allowed")


def test_a_rank_has_no_more_threads_than_are_counted_for_it():
    with World(2, check=True) as world:
        threads = world.run(lambda: len(os.listdir("/proc/self/task")))
    assert max(threads) <= host.RANK_TASKS


def test_a_rank_that_somebody_killed_is_named_with_the_memory_that_is_free(monkeypatch):
    # other tests do run out of memory, and the system counts for all
    monkeypatch.setattr(host, "memory_ran_out", lambda: False)
    with World(2, timeout=GUARD_S) as world:
        os.kill(world.run(os.getpid)[1], signal.SIGKILL)
        words = r"^rank 1 was killed by SIGKILL \(exit code -9\) by somebody, or by what guards .*"
        with pytest.raises(RankError, match=words + r"\(\d+\.\d GB are free\); rank 1 restarted"):
            world.run(total, 0)
        assert world.run(total, 0) == [[1.0], [1.0]]


def test_a_rank_that_the_system_does_not_start_is_named_and_nothing_is_left(monkeypatch):
    def refused(setup):
        raise BlockingIOError("Resource temporarily unavailable")

    World(1).close()
    before = os.listdir(host.private_folder())
    monkeypatch.setattr(launch, "start_rank", refused)
    with pytest.raises(RankError) as caught:
        World(2)
    assert str(caught.value) == (
        "rank 0 cannot start (BlockingIOError: Resource temporarily unavailable): memory or "
        "processes ran out; zerolab doctor says what is there"
    )
    assert os.listdir(host.private_folder()) == before


@contextlib.contextmanager
def own_control_group(controller, limit_name, limit):
    """A control group below this process's own, with a limit; removed in the end."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            group = Path(f"/sys/fs/cgroup/{controller}{path}") / f"zerolab-test-{os.getpid()}"
            break
    else:
        pytest.skip(f"no control group of version 1 limits {controller} here")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / limit_name).write_text(str(limit))
        yield group
    finally:

        def removed():
            with contextlib.suppress(OSError):
                group.rmdir()
            return not group.exists()

        assert comes_true(removed)


CROWDED = """
    import sys
    from pathlib import Path
    (Path(sys.argv[1]) / "cgroup.procs").write_text("0")
    sys.path.insert(0, sys.argv[2])
    from test_shared_host import total, use_memory
    from zerolab.practice.world import World
    try:
        World(40)
    except ValueError as error:
        print(error)
    with World(2) as world:
        try:
            world.run(use_memory, 1, 10**9)
        except RuntimeError as error:
            print(error)
        print(world.run(total, 0))
"""


def test_a_real_limit_refuses_many_ranks_and_names_the_one_that_it_ended():
    with own_control_group("memory", "memory.limit_in_bytes", 700_000_000) as group:
        learner = script(CROWDED, str(group), str(Path(__file__).parent))
        refusal, ended, sums = learner.communicate(timeout=GUARD_S)[0].splitlines()
    assert refusal.startswith("40 ranks do not fit, at most ")
    assert ended == (
        "rank 1 was killed by SIGKILL (exit code -9), most likely because memory ran out: use "
        "smaller tensors or fewer ranks, or shut down other kernels; rank 1 restarted without "
        "variables"
    )
    assert sums == "[[1.0], [1.0]]"


# ---- what killed notebooks leave


KILLED = """
    import os, sys, time
    from zerolab.practice.world import World
    world = World(2)
    from multiprocessing import forkserver
    print(*world.run(os.getpid), forkserver._forkserver._forkserver_pid, world._folder, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def base():
    """A short place for private folders: a socket's name has 107 bytes."""
    base = tempfile.mkdtemp()
    yield Path(base)
    shutil.rmtree(base)


def killed_learner(base, with_server=False, with_group=False):
    """A learner whose process was killed while a world ran; returns its world's folder."""
    process = script(KILLED, TMPDIR=str(base), XDG_RUNTIME_DIR="")
    *pids, server, folder = process.stdout.readline().split()
    if with_server:
        os.kill(int(server), signal.SIGKILL)
        assert comes_true(lambda: not alive(server))
    os.killpg(process.pid, signal.SIGKILL) if with_group else process.kill()
    process.communicate()
    assert comes_true(lambda: not any(map(alive, [*pids, server])))
    return folder


@pytest.mark.parametrize("with_group", [False, True], ids=["alone", "as Jupyter does"])
def test_a_killed_kernel_takes_its_ranks_its_server_and_its_folder_with_it(base, with_group):
    killed_learner(base, with_group=with_group)
    assert comes_true(lambda: not os.listdir(base))


def test_where_the_server_was_killed_too_the_next_world_sweeps(base):
    folder = killed_learner(base, with_server=True)
    assert os.path.exists(folder)
    host.sweep(str(base))
    assert os.listdir(base) == []


def test_a_living_worlds_folder_is_never_swept(base):
    process = script(KILLED, TMPDIR=str(base), XDG_RUNTIME_DIR="")
    try:
        folder = Path(process.stdout.readline().split()[-1])
        host.sweep(str(base))
        assert folder.is_dir()
        # as it looks from a container whose process ids are others
        elsewhere = base / folder.parent.name.replace(f"-{process.pid}-", f"-{2**30}-")
        assert elsewhere != folder.parent
        folder.parent.rename(elsewhere)
        host.sweep(str(base))
        assert (elsewhere / folder.name).is_dir()
    finally:
        process.kill()
        process.communicate()
    assert comes_true(lambda: host.sweep(str(base)) or not os.listdir(base))


def test_only_this_users_folders_of_this_host_are_swept(base):
    stale = f"{host._prefix()}{2**30}-"
    for name in (stale + "mine", stale + "theirs", f"zerolab-00000000-{2**30}-other_host", "x"):
        (base / name).mkdir()
        (base / name / "lock").touch()
    (base / (stale + "link")).symlink_to(base / "x")
    (base / (stale + "file")).touch()
    left = {f"zerolab-00000000-{2**30}-other_host", "x", stale + "link", stale + "file"}
    if os.getuid() == 0:
        os.chown(base / (stale + "theirs"), NOBODY, NOBODY)
        left.add(stale + "theirs")
    host.sweep(str(base))
    assert set(os.listdir(base)) == left


# ---- what other users can do


def as_nobody(action):
    """What another user gets: the action's value or its error, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = repr(action())
        except BaseException as error:
            said = type(error).__name__
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def connect_to(kind, address):
    with socket.socket(kind) as stranger:
        stranger.settimeout(GUARD_S)
        stranger.connect(address)
        return "connected"


def gloo_ports():
    """The ports that this rank listens on."""
    mine = {os.readlink(fd) for fd in glob.glob("/proc/self/fd/*") if os.path.islink(fd)}
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows
            if row[3] == "0A" and f"socket:[{row[9]}]" in mine]  # fmt: skip


@pytest.fixture
def world():
    with World(2, timeout=GUARD_S) as world:
        yield world
        assert world.run(total, 0) == [[1.0], [1.0]]


def test_folders_sockets_and_files_are_for_their_user_alone(world):
    folders = [Path(host.private_folder()), *Path(host.private_folder()).rglob("*")]
    modes = {path: path.stat() for path in folders if path.is_dir()}
    assert Path(world._folder) in modes
    assert {stat.st_mode & 0o777 for stat in modes.values()} == {0o700}
    assert {stat.st_uid for stat in modes.values()} == {os.getuid()}


def test_another_user_reaches_neither_folder_nor_socket_nor_process(world):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    from multiprocessing import forkserver

    rank = world.run(os.getpid)[0]
    (store,) = Path(world._folder).glob("group*")
    server = forkserver._forkserver._forkserver_address
    attempts = {
        "look into the folder": lambda: os.listdir(world._folder),
        "read the store": lambda: store.read_bytes(),
        "write the store": lambda: open(store, "ab"),  # noqa: SIM115
        "ask the server for a process": lambda: connect_to(socket.AF_UNIX, server),
        "open the pipes": lambda: (
            [os.open(fd, os.O_RDWR) for fd in glob.glob(f"/proc/{rank}/fd/0")]
            or os.listdir(f"/proc/{rank}/fd")
        ),
        "read the memory": lambda: open(f"/proc/{rank}/mem", "rb"),  # noqa: SIM115
        "end the rank": lambda: os.kill(rank, signal.SIGTERM),
    }
    assert {what: as_nobody(attempt) for what, attempt in attempts.items()} == dict.fromkeys(
        attempts, "PermissionError"
    )
    assert as_nobody(lambda: os.getuid()) == str(NOBODY)  # it was another user indeed


def test_in_a_network_of_their_own_ranks_have_no_port_that_another_user_reaches(world):
    if not world.private_ports:
        pytest.skip("network namespaces are not allowed here")
    for (port,) in world.run(gloo_ports):
        with pytest.raises(ConnectionRefusedError):
            connect_to(socket.AF_INET, ("127.0.0.1", port))


STRANGERS = """
    import os, socket, sys
    sys.path.insert(0, sys.argv[1])
    from test_shared_host import gloo_ports, total
    from zerolab.practice.world import World
    strangers = []
    with World(3) as world:
        for (port,) in world.run(gloo_ports):
            for said in (b"", b"x", os.urandom(4096), *(bytes([n, *7 * [0]]) for n in range(8))):
                stranger = socket.create_connection(("127.0.0.1", port))
                stranger.sendall(said)
                strangers.append(stranger)
        print(len(strangers), world.private_ports, world.run(total, 1))
        for stranger in strangers:
            stranger.close()
        print(world.run(total, 2))
"""


def test_strangers_at_the_ports_of_a_group_that_has_formed_change_nothing():
    learner = script(STRANGERS, str(Path(__file__).parent), ZEROLAB_HOST_NETWORK="1")
    met, after = learner.communicate(timeout=GUARD_S)[0].splitlines()
    assert met == f"{3 * 11} False {[[6.0]] * 3}"
    assert after == str([[9.0]] * 3)


def test_where_ports_must_be_private_and_cannot_be_a_world_is_refused_in_one_sentence():
    program = """
        from zerolab.practice.world import World
        try:
            World(2)
        except RuntimeError as error:
            print(error)
    """
    host_network = {"ZEROLAB_HOST_NETWORK": "1", "ZEROLAB_PRIVATE_PORTS": "required"}
    said = script(program, **host_network).communicate(timeout=GUARD_S)[0]
    assert said == (
        "the ranks cannot form a group: rank 0: PermissionError: ports must be private "
        "(ZEROLAB_PRIVATE_PORTS), and network namespaces are not allowed here: ask who runs this "
        "machine\n"
    )


def test_where_ports_must_be_private_and_can_be_a_world_starts(monkeypatch):
    if not namespaces_are_allowed():
        pytest.skip("network namespaces are not allowed here")
    monkeypatch.setenv("ZEROLAB_PRIVATE_PORTS", "required")
    with World(2) as world:
        assert world.private_ports


def test_jupyter_has_the_settings_that_the_guide_names():
    from jupyter_client import KernelManager
    from jupyter_server.services.kernels.kernelmanager import MappingKernelManager

    guide = Path(__file__).parent.parent / "docs" / "guide" / "shared_hosts.md"
    settings = re.findall(r"^c\.(\w+)\.(\w+) = ", guide.read_text(), re.MULTILINE)
    known = {"KernelManager": KernelManager, "MappingKernelManager": MappingKernelManager}
    assert len(settings) == 3
    assert all(known[owner].class_traits()[name].metadata["config"] for owner, name in settings)
