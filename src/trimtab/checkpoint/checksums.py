"""Checksums of a file by chunks, on a few threads: as fast as the disk, or nearly."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor

CHUNK_BYTES = 2**26  # of the format: a manifest's checksums are of chunks of this size
THREADS = 2  # two keep up with a disk that is written, and leave a training its processors
MOST_THREADS = 8  # of who reads: nothing else is to be done then
_READ_BYTES = 2**20  # stays in a processor's cache between being read and summed


def crc32_of_chunks(descriptor: int, size: int, pool: ThreadPoolExecutor) -> tuple[str, ...]:
    """Return the CRC-32 of each chunk of an open file, in hexadecimal.

    Raises:
        OSError: it cannot be read, or ends before `size` bytes.
    """

    def of(start: int) -> str:
        return _crc32(descriptor, start, min(start + CHUNK_BYTES, size))

    starts = range(0, size, CHUNK_BYTES)
    return tuple(map(of, starts) if len(starts) < 2 else pool.map(of, starts))


def _crc32(descriptor: int, at: int, end: int) -> str:
    found, buffer = 0, memoryview(bytearray(min(_READ_BYTES, end - at)))
    while at < end:
        count = os.preadv(descriptor, [buffer[: end - at]], at)
        if count == 0:
            raise OSError(f"it ends after {at} bytes")
        found = zlib.crc32(buffer[:count], found)
        at += count
    return f"{found:08x}"
