"""Chunked checksums of a file, computed by a few threads at nearly disk speed."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

try:  # same checksums, several times faster
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

CHUNK_BYTES = 2**26  # part of the format: manifests list a checksum per chunk of this size
THREADS = 2  # for writing: enough for the disk's speed, while training needs the remaining cores
MOST_THREADS = 8  # for reading, when nothing else runs
_READ_BYTES = 2**20  # small enough to stay in the CPU cache between read and checksum
_MOST_PIECES = 1024  # maximum number of buffers for one preadv call (IOV_MAX)


class FileBuffer:
    """Memory for a file's contents, as consecutive pieces.

    Attributes:
        bytes: Total size.
    """

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = [*itertools.accumulate(map(len, self._pieces))]
        self.bytes = self._ends[-1] if self._ends else 0

    def part(self, start: int, end: int) -> list[memoryview]:
        """Return the pieces for bytes `start` to `end`, limited to the number of buffers of a system call."""
        index, found = bisect.bisect_right(self._ends, start), list[memoryview]()
        while start < end and len(found) < _MOST_PIECES:
            begin = self._ends[index] - len(self._pieces[index])
            found.append(self._pieces[index][start - begin : end - begin])
            start = self._ends[index]
            index += 1
        return found


def crc32_of_chunks(
    descriptor: int, size: int, pool: ThreadPoolExecutor, room: FileBuffer | None = None
) -> tuple[str, ...]:
    """Return the CRC-32 of each chunk of an open file, in hexadecimal.

    Args:
        descriptor: Open file.
        size: Size of the file in bytes.
        pool: Threads for the chunks.
        room: Memory that receives the file's contents; None to discard the contents.

    Raises:
        OSError: Reading failed, or the file is shorter than `size`.
        ValueError: `room` has another size.
    """
    if room is not None and room.bytes != size:
        raise ValueError(f"the memory has {room.bytes} bytes, but the file has {size} bytes")

    def of(start: int) -> str:
        return _crc32(descriptor, start, min(start + CHUNK_BYTES, size), room)

    starts = range(0, size, CHUNK_BYTES)
    return tuple(map(of, starts) if len(starts) < 2 else pool.map(of, starts))


def _crc32(descriptor: int, at: int, end: int, room: FileBuffer | None) -> str:
    found, taking = 0, _again(min(_READ_BYTES, end - at)) if room is None else room.part
    while at < end:
        pieces = taking(at, min(at + _READ_BYTES, end))
        count = os.preadv(descriptor, pieces, at)
        if count == 0:
            raise OSError(f"the file ends after {at} bytes")
        at += count
        for piece in pieces:
            found = crc32(piece[:count], found)
            count -= min(count, len(piece))
    return f"{found:08x}"


def _again(size: int) -> Callable[[int, int], list[memoryview]]:
    """Return a function that reuses a buffer for every part, for callers without need for the contents."""
    buffer = memoryview(bytearray(size))
    return lambda start, end: [buffer[: end - start]]
