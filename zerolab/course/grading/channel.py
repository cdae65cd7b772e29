"""Messages between the grader and its programs: JSON, and blobs of bytes beside it.

A program's standard input and output carry them, and nothing else gets there.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

DEBUG = "ZEROLAB_GRADE_DEBUG"  # in the environment: errors are shown
Answer = tuple[Any, list[bytes]]
MOST_BYTES = 256 * 2**20  # of one message
MOST_TEXT = 16 * 2**20  # of its JSON, which takes many times as much memory once it is read


class Garbled(ValueError):
    """A message that is none of ours."""


def send(stream: BinaryIO, header: Any, blobs: list[bytes] | None = None) -> None:
    """Writes one message; ValueError for one that is too large."""
    blobs = blobs or []
    text = json.dumps([header, [len(blob) for blob in blobs]]).encode()
    if len(text) > MOST_TEXT or len(text) + sum(map(len, blobs)) > MOST_BYTES:
        raise ValueError(f"a message of more than {MOST_BYTES >> 20} MiB")
    stream.write(struct.pack("<Q", len(text)) + text)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def receive(read: Callable[[int], bytes]) -> tuple[Any, list[bytes]]:
    """The next message, by a function that reads exactly so many bytes. Garbled if it is none."""
    size = struct.unpack("<Q", read(8))[0]
    if size > MOST_TEXT:
        raise Garbled("a message that is too large")
    try:
        header, sizes = json.loads(read(size))
        total = sum(sizes)
        sound = all(type(n) is int and n >= 0 for n in sizes) and total <= MOST_BYTES
    except (ValueError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise Garbled("a message that is none of ours")
    return header, [read(n) for n in sizes]


def take() -> tuple[BinaryIO, BinaryIO]:
    """Messages' two ends; from here on what the program prints goes nowhere."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1) if DEBUG in os.environ else (0, 1, 2):
        os.dup2(nothing, stream)
    return source, sink


def serve(answer: Callable[[Any, list[bytes]], Answer]) -> None:
    """Answers messages one by one until the grader closes its end."""
    source, sink = take()
    own = os.getpid()
    while True:
        try:
            request, blobs = receive(lambda size: read(source, size))
        except EOFError:
            return
        try:
            reply = answer(request, blobs)
            if os.getpid() != own:  # a cell forked; the child has no say here
                os._exit(0)
            send(sink, *reply)
        except (ValueError, RecursionError, MemoryError) as error:
            send(sink, {"raised": {"type": "ValueError", "text": f"too large: {error}"}})


def read(source: BinaryIO, size: int) -> bytes:
    """Exactly so many bytes; EOFError where there are no more."""
    got = source.read(size)
    if len(got) < size:
        raise EOFError
    return got


def said(error: BaseException, where: str = "") -> dict[str, Any]:
    """An exception as JSON."""
    try:
        text = str(error)[:2000]
    except Exception:
        text = ""
    return {"raised": {"type": type(error).__name__, "text": text, "where": where}}


def stop() -> None:
    """Ends this process at once, whatever its threads do."""
    sys.stdout.flush()
    os._exit(0)
