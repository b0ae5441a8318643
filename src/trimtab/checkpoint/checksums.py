"""Checksums of a file by chunks, on a few threads: as fast as the disk, or nearly."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

try:  # the same sums, several times faster
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

CHUNK_BYTES = 2**26  # of the format: a manifest's checksums are of chunks of this size
THREADS = 2  # two keep up with a disk that is written, and leave a training its processors
MOST_THREADS = 8  # of who reads: nothing else is to be done then
_READ_BYTES = 2**20  # stays in a processor's cache between being read and summed
_MOST_PIECES = 1024  # that a system takes in one call


class Room:
    """Memory for a file's bytes, in pieces that follow one another.

    Attributes:
        bytes: of all pieces.
    """

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = [*itertools.accumulate(map(len, self._pieces))]
        self.bytes = self._ends[-1] if self._ends else 0

    def part(self, start: int, end: int) -> list[memoryview]:
        """Return the memory from byte `start` on, up to `end` or as far as one call can read."""
        index, found = bisect.bisect_right(self._ends, start), []
        while start < end and len(found) < _MOST_PIECES:
            begin = self._ends[index] - len(self._pieces[index])
            found.append(self._pieces[index][start - begin : end - begin])
            start = self._ends[index]
            index += 1
        return found


def crc32_of_chunks(descriptor: int, size: int, pool: ThreadPoolExecutor, room: Room | None = None) -> tuple[str, ...]:
    """Return the CRC-32 of each chunk of an open file, in hexadecimal.

    Args:
        room: for all its bytes, which are there when it returns.

    Raises:
        OSError: it cannot be read, or ends before `size` bytes. ValueError: the room is for more or fewer.
    """
    if room is not None and room.bytes != size:
        raise ValueError(f"room for {room.bytes} bytes, of {size}")

    def of(start: int) -> str:
        return _crc32(descriptor, start, min(start + CHUNK_BYTES, size), room)

    starts = range(0, size, CHUNK_BYTES)
    return tuple(map(of, starts) if len(starts) < 2 else pool.map(of, starts))


def _crc32(descriptor: int, at: int, end: int, room: Room | None) -> str:
    found, taking = 0, _again(min(_READ_BYTES, end - at)) if room is None else room.part
    while at < end:
        pieces = taking(at, min(at + _READ_BYTES, end))
        count = os.preadv(descriptor, pieces, at)
        if count == 0:
            raise OSError(f"it ends after {at} bytes")
        at += count
        for piece in pieces:
            found = crc32(piece[:count], found)
            count -= min(count, len(piece))
    return f"{found:08x}"


def _again(size: int) -> Callable[[int, int], list[memoryview]]:
    """Return what gives the same memory for every part: of who wants the sums alone."""
    buffer = memoryview(bytearray(size))
    return lambda start, end: [buffer[: end - start]]
