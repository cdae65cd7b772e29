"""The same training under torchrun, under srun, and on two hosts, as on ranks of our own."""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from zerolab.cli import main

TRAIN = ["-m", "zerolab", "train", "--stage", "3", "--steps", "4", "--every", "2", "--json"]
LIMIT_S = 600  # decides nothing: a test that needs it has failed


@pytest.fixture(scope="module")
def on_own_ranks():
    with contextlib.redirect_stdout(io.StringIO()) as printed_here:
        assert main([*TRAIN[2:], "--ranks", "2"]) == 0
    return json.loads(printed_here.getvalue())


@pytest.fixture
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options, *TRAIN]


def start(command, **more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    environ = {k: v for k, v in os.environ.items() if k not in names and "SLURM" not in k}
    return subprocess.Popen(
        command,
        env=environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def printed(*processes):
    """What each process printed; all must have ended well, and none stays in any case."""
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process, (out, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, out + err
    return [out for out, _ in said]


def test_torchrun_trains_the_same_bits_and_one_rank_speaks(on_own_ranks, free_port):
    options = ("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", free_port)
    (out,) = printed(start(torchrun(*options)))
    assert json.loads(out) == on_own_ranks


ALONE = """
import datetime, sys
from zerolab.cli import main
from zerolab.practice.launcher import attached, group

attached.SILENT_S, group.GROUP_TIMEOUT = 1.0, datetime.timedelta(seconds=6)
sys.exit(main(["train", "--stage", "1"]))
"""


@pytest.mark.parametrize(("rank", "words"), [(0, "ranks 1, 2"), (1, "rank 0"), (2, "rank 0")])
def test_a_rank_whose_partners_never_come_says_for_whom_it_waits(free_port, rank, words):
    given = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    process = start([sys.executable, "-c", ALONE], **given, MASTER_PORT=free_port)
    out, said = process.communicate(timeout=LIMIT_S)
    waits = f"rank {rank} waits for {words} of 3 at 127.0.0.1:{free_port}"
    lines = said.splitlines()
    assert f"zerolab: {waits}" in lines
    assert lines[-1].startswith(f"zerolab train: {waits} in vain: start all ranks with")
    assert "Traceback" not in said
    assert (process.returncode, out) == (2, "")


def test_sruns_variables_are_enough_and_a_checkpoint_goes_from_one_to_the_other(
    on_own_ranks, free_port, tmp_path, capsys
):
    save = ["--checkpoint", str(tmp_path)]
    assert main([*TRAIN[2:], *save, "--ranks", "3", "--stage", "0", "--steps", "2"]) == 0
    capsys.readouterr()
    tasks = [
        start(
            [sys.executable, *TRAIN, *save, "--resume"],
            SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NTASKS="2",
            SLURM_STEP_NUM_TASKS="2", SLURM_NNODES="1", SLURM_JOB_ID="1", MASTER_PORT=free_port,
        )
        for rank in range(2)
    ]  # fmt: skip
    first, second = printed(*tasks)
    trained = json.loads(first)
    assert second == ""
    assert (trained["ranks"], trained["steps"]) == (2, 4)
    assert trained["loss"] == pytest.approx(on_own_ranks["loss"], rel=0.02)  # bf16, other orders


# ---- two hosts


TWO_HOSTS = """
set -e
ip link set lo up
unshare --net sleep 300 & other=$!
trap 'kill $(jobs -p)' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
in_other() { nsenter --target $other --net "$@"; }
ip link add left type veth peer name right
ip link set right netns $other
ip addr add 10.77.0.1/24 dev left
ip link set left up
in_other ip addr add 10.77.0.2/24 dev right
in_other ip link set lo up
in_other ip link set right up
"""
RUN_BOTH = """
in_other "$@" --node-rank 1 $JOB > "$OTHER_SAYS" 2>&1 & second=$!
"$@" --node-rank 0 $JOB > "$FIRST_SAYS"
wait $second
awk '/left:/ { print $10 }' /proc/net/dev
"""


@functools.cache
def why_not_two_hosts():
    """Why this machine cannot play two hosts; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool)]
    if missing:
        return f"{missing[0]} is not installed"
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", TWO_HOSTS],
        capture_output=True,
        text=True,
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


def test_two_hosts_train_the_same_bits_over_the_network_between_them(on_own_ranks, tmp_path):
    if reason := why_not_two_hosts():
        pytest.skip(reason)
    options = ("--nnodes", "2", "--nproc-per-node", "1")
    options += ("--master-addr", "10.77.0.1", "--master-port", "29507")  # nobody else is there
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    hosts = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", TWO_HOSTS + RUN_BOTH]
    first, other = tmp_path / "first", tmp_path / "other"
    (sent,) = printed(
        start(
            [*hosts, "hosts", *command],
            JOB=" ".join(TRAIN), FIRST_SAYS=str(first), OTHER_SAYS=str(other),
        )
    )  # fmt: skip
    assert json.loads(first.read_text()) == on_own_ranks, other.read_text()
    assert "step 2 of 4" not in other.read_text()
    # each step sends half of 104,333 parameters' 2 bytes three times, an evaluation once a digit
    assert int(sent) > (4 * 3 + 2 * 3) * 104_333
