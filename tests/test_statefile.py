"""Files of states: what was committed is had back, and what is not whole is named in a sentence."""

import errno
import os
import resource

import pytest
import torch

from zerolab.practice import statefile
from zerolab.practice.statefile import BLOCK, Buffer, StateFile, StateFileError

SIZES = [5000, 12, 40_000]


def make(folder, **more):
    return StateFile(str(folder / "states.bin"), SIZES, "rank 0's states", **more)


def write_all(file, value):
    """One version, in which every number of record i is value + i."""
    for index, size in enumerate(SIZES):
        buffer = Buffer(size)
        buffer.tensor(torch.float32, size // 4).fill_(value + index)
        file.sign(index, buffer)
        file.write(index, buffer)
    file.commit()


def expect_version(file, value):
    """Every record is whole, and of that version."""
    for index, size in enumerate(SIZES):
        buffer = Buffer(size)
        file.read(index, buffer)
        file.check(index, buffer)
        assert buffer.tensor(torch.float32, size // 4).eq(value + index).all()


def test_what_was_committed_is_read_back_and_by_another_process_too(tmp_path):
    file = make(tmp_path)
    for value in (10, 20, 30):
        write_all(file, value)
        expect_version(file, value)
    later = StateFile.found(file.path, SIZES, "rank 0's states")
    assert later.version == 3
    expect_version(later, 30)


def test_bytes_are_counted_as_they_move(tmp_path):
    file = make(tmp_path)
    write_all(file, 1)
    records = sum(statefile.blocks(size) for size in SIZES)
    assert records == 2 * BLOCK + BLOCK + 10 * BLOCK
    assert (file.read_bytes, file.written_bytes) == (0, records + BLOCK)
    expect_version(file, 1)
    assert file.read_bytes == records
    assert os.path.getsize(file.path) == file.num_bytes == 2 * (records + BLOCK)


class Killed(BaseException):
    """Nothing of the process runs after it."""


@pytest.mark.parametrize("fatal", range(4))  # three records and the header
def test_a_kill_in_the_middle_of_any_write_leaves_the_last_finished_version(
    tmp_path, monkeypatch, fatal
):
    file = make(tmp_path)
    write_all(file, 10)
    write_all(file, 20)
    write, calls = os.pwrite, []

    def half(descriptor, data, at):
        calls.append(at)
        if len(calls) - 1 == fatal:
            with open(file.path, "r+b") as other:  # of a header, 30 bytes are half
                other.seek(at)
                other.write(memoryview(data)[: 30 if fatal == 3 else len(data) // 2])
            raise Killed
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(Killed):
        write_all(file, 30)
    monkeypatch.undo()
    found = StateFile.found(file.path, SIZES, "rank 0's states")
    assert found.version == 2
    expect_version(found, 20)
    write_all(found, 40)
    expect_version(found, 40)


def test_a_file_without_a_finished_version_is_not_used(tmp_path):
    file = make(tmp_path)
    with pytest.raises(StateFileError, match=r"no finished version: rank 0's states are lost"):
        StateFile.found(file.path, SIZES, "rank 0's states")


def test_a_truncated_file_is_named(tmp_path):
    file = make(tmp_path)
    write_all(file, 10)
    for length in (file.num_bytes - file.num_bytes // 2 - 1000, 3 * BLOCK):
        os.truncate(file.path, length)
        with pytest.raises(StateFileError, match=r"rank 0's states, record 2 of 3: .*shorter"):
            file.read(2, Buffer(SIZES[2]))


def test_any_altered_bit_is_named_with_what_is_lost(tmp_path):
    file = make(tmp_path)
    write_all(file, 10)
    place = file._offset(1, file._marks[1][0])
    with open(file.path, "r+b") as other:
        other.seek(place + 7)
        byte = other.read(1)[0]
        other.seek(place + 7)
        other.write(bytes([byte ^ 1]))
    buffer = Buffer(SIZES[1])
    file.read(1, buffer)
    words = r"record 1 of 3: the file was altered .* after version 1 is lost; go on from the last"
    with pytest.raises(StateFileError, match=words):
        file.check(1, buffer)


def test_a_disk_that_is_too_full_says_so_before_the_first_step(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, hard))
    try:
        with pytest.raises(StateFileError, match=r"need [0-9,]+ bytes in .*make room"):
            make(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_in_a_step_leaves_the_version_before(tmp_path, monkeypatch):
    file = make(tmp_path)
    write_all(file, 10)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StateFileError, match=r"No space left.* Version 1 is the last"):
        write_all(file, 20)
    monkeypatch.undo()
    expect_version(file, 10)


@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_keeps_nothing_and_the_file_says_how(tmp_path, monkeypatch, direct):
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    file = make(tmp_path)
    write_all(file, 10)
    expect_version(file, 10)
    if direct and not file.how.startswith("unbuffered"):
        pytest.skip(f"this file system offers no unbuffered access: {file.how}")
    assert ("O_DIRECT" in file.how) == direct
    assert file.cached_bytes() == 0


def test_a_file_without_a_name_is_used_all_the_same(tmp_path):
    file = make(tmp_path, named=False)
    assert list(tmp_path.iterdir()) == []
    write_all(file, 10)
    expect_version(file, 10)


def test_closing_removes_the_file(tmp_path):
    file = make(tmp_path)
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []
