"""Records in a file on disk, of which a reader gets what was committed or one sentence.

The file has two places for each record. What is written goes into the one that is not in use, and
counts from `commit` on, when a header that names it lies on the disk too. Of the headers there are
two as well. So whenever a process is killed, one header is whole and all that it names is: the
last version that was finished. The price is twice the space.

    header 0 | header 1 | record 0, 1, 2 … in place 0 | record 0, 1, 2 … in place 1

A mapped file would be simpler, and would measure the page cache: the system would keep the records
in memory as long as there is any. Here they pass it by (O_DIRECT, which wants addresses, offsets
and lengths that are multiples of a block), or where the file system does not offer that, they are
written through and dropped from it. `how` says which.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from zerolab.practice.meter import label
from zerolab.practice.tiers import put

BLOCK = 4096
_HEAD = struct.Struct("<8sQI")  # magic, version, records
_SUM = struct.Struct("<I")
_MAGIC = b"zerolab1"


class StateFileError(RuntimeError):
    """What was written cannot be had back, or cannot be written; the sentence says what is lost."""


def blocks(num_bytes: int) -> int:
    """Bytes in whole blocks: 1 takes 4096."""
    return -(-num_bytes // BLOCK) * BLOCK


class Buffer:
    """Memory of whole blocks from a block's edge on, as unbuffered reads and writes want it."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, max(blocks(num_bytes), BLOCK))
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        label(put(self._bytes, "cpu"), "temporary")

    def tensor(self, dtype: torch.dtype, numel: int) -> Tensor:
        """The first elements, as a tensor (numel,) over the same memory."""
        return self._bytes[: numel * dtype.itemsize].view(dtype)


class StateFile:
    """One rank's records of given sizes, in bytes; `what` they are is named in errors.

    `read` fills a buffer from the committed version and compares its checksum; `write` puts a
    buffer into the next version, which `commit` makes the one that counts. `read_bytes` and
    `written_bytes` count what was really moved, headers included. A file that is not `named` has
    no name from the start, and is gone when its process is. StateFileError where one cannot write.
    """

    how = "written through, and dropped from the page cache"

    def __init__(
        self, path: str, sizes: Sequence[int], what: str, anew: bool = True, named: bool = True
    ) -> None:
        self.path, self.sizes, self.what = path, list(sizes), what
        self.read_bytes = self.written_bytes = self.version = 0
        self._table = struct.Struct(f"<{2 * len(sizes)}I")
        self._signed = _HEAD.size + self._table.size  # bytes of a header that its checksum covers
        self._head = mmap.mmap(-1, blocks(self._signed + 4))
        self._starts = [0, *accumulate(blocks(size) for size in sizes)]
        self.num_bytes = 2 * (len(self._head) + self._starts[-1])
        self._marks = [(0, 0)] * len(sizes)  # of each record: which place, which checksum
        self._next = list(self._marks)
        self._descriptor = -1
        try:
            self._open(anew, named)
        except OSError as error:
            self.close()
            raise self._cannot_write(error) from None

    def _open(self, anew: bool, named: bool) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if anew else 0)
        direct = getattr(os, "O_DIRECT", 0)
        try:
            self._descriptor = os.open(self.path, flags | (direct or os.O_DSYNC), 0o600)
            if anew and direct:
                os.pwrite(self._descriptor, self._head, 0)  # some systems refuse only here
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:  # it means that this is not offered
                raise
            direct, self._descriptor = 0, os.open(self.path, flags | os.O_DSYNC, 0o600)
        if direct:
            self.how = "unbuffered (O_DIRECT)"
        if not named:
            os.unlink(self.path)
        if anew and hasattr(os, "posix_fallocate"):  # a disk that is too full says so now
            os.posix_fallocate(self._descriptor, 0, self.num_bytes)

    @classmethod
    def found(cls, path: str, sizes: Sequence[int], what: str) -> StateFile:
        """The file that another process left behind, at the last version that it committed."""
        file = cls(path, sizes, what, anew=False)
        for place in (0, 1):
            got = os.preadv(file._descriptor, [file._head], place * len(file._head))
            magic, version, records = _HEAD.unpack_from(file._head)
            (signature,) = _SUM.unpack_from(file._head, file._signed)
            whole = got == len(file._head) and (magic, records) == (_MAGIC, len(sizes))
            whole = whole and signature == zlib.crc32(file._head[: file._signed])
            if whole and version > file.version:
                file.version = version
                numbers = file._table.unpack_from(file._head, _HEAD.size)
                file._marks = list(zip(numbers[::2], numbers[1::2], strict=True))
        if not file.version:
            raise StateFileError(f"{path} holds no finished version: {what} are lost; start anew.")
        file._next = list(file._marks)
        return file

    def read(self, index: int, buffer: Buffer) -> None:
        """Fills `buffer` with a record; `check` says later whether it is what was written."""
        view = memoryview(buffer.memory)[: blocks(self.sizes[index])]
        at, got = self._offset(index, self._marks[index][0]), 0
        while got < len(view):
            try:
                count = os.preadv(self._descriptor, [view[got:]], at + got)
            except OSError as error:
                raise self._lost(index, f"the disk says: {error.strerror}") from None
            if count % BLOCK or not count:
                raise self._lost(index, "the file is shorter than what was written")
            got += count
        self.read_bytes += got
        self._drop(at, got)

    def check(self, index: int, buffer: Buffer) -> None:
        """StateFileError unless `buffer` holds the bits of the record that was committed."""
        if self._sum(index, buffer) != self._marks[index][1]:
            raise self._lost(index, "the file was altered since it was written")

    def sign(self, index: int, buffer: Buffer) -> None:
        """Notes the place and the checksum of what `write` is about to put there."""
        self._next[index] = (1 - self._marks[index][0], self._sum(index, buffer))

    def write(self, index: int, buffer: Buffer) -> None:
        """Puts a record into the next version; the one that counts stays as it is."""
        view = memoryview(buffer.memory)[: blocks(self.sizes[index])]
        self._write(view, self._offset(index, 1 - self._marks[index][0]))

    def commit(self) -> None:
        """Makes the version that was just written the one that counts."""
        _HEAD.pack_into(self._head, 0, _MAGIC, self.version + 1, len(self.sizes))
        self._table.pack_into(self._head, _HEAD.size, *chain(*self._next))
        _SUM.pack_into(self._head, self._signed, zlib.crc32(self._head[: self._signed]))
        self._settle()  # the records first, then the header that names them
        self._write(memoryview(self._head), (self.version + 1) % 2 * len(self._head))
        self._settle()
        self.version, self._marks = self.version + 1, list(self._next)

    def cached_bytes(self) -> int | None:
        """Bytes of this file that the system's page cache holds now; None where it cannot tell."""
        libc = ctypes.CDLL(None, use_errno=True)
        pages = -(-self.num_bytes // mmap.PAGESIZE)
        libc.mmap.restype, address = ctypes.c_void_p, None
        arguments = (mmap.PROT_READ, mmap.MAP_SHARED, self._descriptor, ctypes.c_long(0))
        address = libc.mmap(None, ctypes.c_size_t(self.num_bytes), *arguments)
        resident = (ctypes.c_ubyte * pages)()
        try:
            size = ctypes.c_size_t(self.num_bytes)
            failed = libc.mincore(ctypes.c_void_p(address), size, resident)
        finally:
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(self.num_bytes))
        return None if failed else sum(page & 1 for page in resident) * mmap.PAGESIZE

    def close(self) -> None:
        """Closes and removes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _offset(self, index: int, place: int) -> int:
        return 2 * len(self._head) + place * self._starts[-1] + self._starts[index]

    def _sum(self, index: int, buffer: Buffer) -> int:
        return zlib.crc32(memoryview(buffer.memory)[: self.sizes[index]])

    def _write(self, view: memoryview, at: int) -> None:
        put = 0
        try:
            while put < len(view):
                put += os.pwrite(self._descriptor, view[put:], at + put)
            self._drop(at, put)
        except OSError as error:
            raise self._cannot_write(error) from None
        self.written_bytes += put

    def _settle(self) -> None:
        """Waits until the disk has all that was written."""
        try:
            getattr(os, "fdatasync", os.fsync)(self._descriptor)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _drop(self, at: int, length: int) -> None:
        if self.how == StateFile.how and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, at, length, os.POSIX_FADV_DONTNEED)

    def _lost(self, index: int, why: str) -> StateFileError:
        return StateFileError(
            f"{self.what}, record {index} of {len(self.sizes)}: {why}, so what it held after "
            f"version {self.version} is lost; go on from the last checkpoint, or start anew."
        )

    def _cannot_write(self, error: OSError) -> StateFileError:
        return StateFileError(
            f"{self.what} need {self.num_bytes:,} bytes in {os.path.dirname(self.path)}, and the "
            f"disk says: {error.strerror}. Version {self.version} is the last that was finished; "
            "make room, or name another folder."
        )
