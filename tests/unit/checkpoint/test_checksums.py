"""Checksums of a file: those of zlib, of every byte, whether the bytes are kept or not, however few a call returns."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from trimtab.checkpoint import atomic_directory
from trimtab.checkpoint.atomic_directory import FileBuffer, crc32_of_chunks

CONTENT = random.Random(0).randbytes(3_500_000)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("checksums") / "file"
    path.write_bytes(CONTENT)
    return path


def sums(path, size, room=None):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(2) as pool:
            return crc32_of_chunks(descriptor, size, pool, room)
    finally:
        os.close(descriptor)


def room_of(sizes):
    pieces = [bytearray(size) for size in sizes]
    return pieces, FileBuffer(map(memoryview, pieces))


def cut(size, chance, mean):
    """Return sizes that add up to one, some of them 0."""
    sizes, left = [], size
    while left:
        sizes.append(min(left, int(chance.expovariate(1 / mean)) * chance.choice((0, 1, 1))))
        left -= sizes[-1]
    return sizes


@pytest.mark.parametrize("mean", [50, 10_000, 2_000_000])  # more pieces than a call takes; fewer; larger than one
@pytest.mark.parametrize("chunk", [2**26, 1_200_001])
def test_what_is_kept_is_the_file_and_its_sums_are_zlibs(path, monkeypatch, mean, chunk):
    monkeypatch.setattr(atomic_directory, "CHUNK_BYTES", chunk)
    expected = tuple(f"{zlib.crc32(CONTENT[at : at + chunk]):08x}" for at in range(0, len(CONTENT), chunk))
    pieces, room = room_of(cut(len(CONTENT), random.Random(mean), mean))
    assert sums(path, len(CONTENT), room) == sums(path, len(CONTENT)) == expected
    assert b"".join(pieces) == CONTENT


def test_calls_that_return_fewer_bytes_than_there_is_room_for(path, monkeypatch):
    whole, chance = os.preadv, random.Random(0)

    def few(descriptor, pieces, at):
        first = bytearray(chance.randint(1, 70_000))
        count = rest = whole(descriptor, [first], at)
        for piece in pieces:
            taken = min(rest, len(piece))
            piece[:taken] = first[count - rest : count - rest + taken]
            rest -= taken
        return count - rest

    monkeypatch.setattr(os, "preadv", few)
    pieces, room = room_of(cut(len(CONTENT), chance, 30_000))
    assert sums(path, len(CONTENT), room) == (f"{zlib.crc32(CONTENT):08x}",)
    assert b"".join(pieces) == CONTENT


def test_a_file_that_ends_early(path):
    with pytest.raises(OSError, match=f"ends after {len(CONTENT)} bytes"):
        sums(path, len(CONTENT) + 1, room_of([len(CONTENT) + 1])[1])


def test_without_the_faster_library_the_sums_are_the_same(path, monkeypatch):
    pytest.importorskip("zlib_ng")
    assert atomic_directory.crc32 is not zlib.crc32
    expected = sums(path, len(CONTENT))
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    spec = importlib.util.spec_from_file_location("without_zlib_ng", atomic_directory.__file__)
    other = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, other)  # dataclasses look their module up
    spec.loader.exec_module(other)
    assert other.crc32 is zlib.crc32
    monkeypatch.setattr(atomic_directory, "crc32", other.crc32)
    assert sums(path, len(CONTENT)) == expected
