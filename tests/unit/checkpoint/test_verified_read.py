"""A state that is verified and read at once: the same as one that is read alone, and never of bytes that were not."""

from __future__ import annotations

import errno
import json
import os
import struct
import weakref

import pytest
import torch
from raising import raises
from saving import gone_on_from, loaded, save
from test_tensor_packing import BITS, BOMBS, TYPES, assert_same, header

from trimtab.checkpoint import atomic_directory, manifest, verified_read
from trimtab.checkpoint.atomic_directory import newest_good, verify, write_manifest
from trimtab.checkpoint.manifest import NAME, TENSORS, TREE, FileBuffer
from trimtab.checkpoint.state_files import read_state, write_state
from trimtab.checkpoint.verified_read import VerifiedReader
from trimtab.core.errors import DamagedError, FormatError


def folder_of(path, state, step=1):
    path.mkdir()
    write_state(path, state)
    write_manifest(path, {"step": step})
    return path


def taken(folder):
    once = VerifiedReader()
    once.verify(folder)
    return once.take(folder)


def forged(folder, content):
    """Put a file of tensors into a folder, as one who can write there does."""
    (folder / TENSORS).write_bytes(content)
    (folder / NAME).unlink()
    write_manifest(folder, {"step": 1})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_bit_of_every_type_and_size(tmp_path):
    state = {str(dtype): BITS.view(dtype).reshape(2, -1) for dtype in TYPES}
    state |= {"truth": torch.tensor([True, False, True]), "none": torch.ones(3, 0), "one": torch.tensor(2.5)}
    state |= {f"odd {size}": torch.arange(size, dtype=torch.uint8) for size in range(1, 20)}
    folder = folder_of(tmp_path / "step-1", state)
    files, expected = taken(folder), read_state(folder)
    for name in (TENSORS, TREE):
        (folder / name).unlink()  # what was verified is what counts, whatever becomes of the files
    found = read_state(folder, taken=files)
    assert found.keys() == expected.keys() == state.keys()
    for name, each in state.items():
        assert_same(found[name], each)
        assert_same(expected[name], each)


def test_thousands_of_tensors(tmp_path):
    state = [torch.full((index % 7,), float(index)) for index in range(3_000)]
    folder = folder_of(tmp_path / "step-1", state)
    for found, expected in zip(read_state(folder, taken=taken(folder)), state, strict=True):
        assert_same(found, expected)


def test_each_tensor_has_memory_of_its_own(tmp_path):
    folder = folder_of(tmp_path / "step-1", {"a": torch.ones(1000), "b": torch.ones(10)})
    for tensor in read_state(folder, taken=taken(folder)).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # one that is kept does not keep the others
        assert tensor.data_ptr() % 64 == 0  # as any other: how sums are rounded may hang upon it


def test_the_default_device_is_nothing_to_it(tmp_path):
    folder = folder_of(tmp_path / "step-1", {"a": torch.ones(4)})
    with torch.device("meta"):
        files = taken(folder)
    assert torch.equal(read_state(folder, taken=files)["a"], torch.ones(4))


def test_it_is_given_once_and_of_the_folder_that_was_verified_last(tmp_path):
    one, two = (folder_of(tmp_path / f"step-{step}", {"a": torch.ones(4)}, step) for step in (1, 2))
    once = VerifiedReader()
    assert once.take(one) is None
    once.verify(one)
    once.verify(two)
    assert once.take(one) is None
    once.verify(two)
    assert once.take(two) is not None
    assert once.take(two) is None


def test_nothing_is_to_be_had_of_what_was_damaged(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    folder, once = tmp_path / "step-2", VerifiedReader()
    for name in (TENSORS, TREE, "shard.bin"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with raises(DamagedError, code="checkpoint.checksum_differs", field=str(folder / name)):
            once.verify(folder)
        assert once.take(folder) is None
        assert gone_on_from(tmp_path)[0] == 1
        (folder / name).write_bytes(content)


def test_what_cannot_be_read_holds_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 4096)  # so that threads read it
    for step in (1, 2):
        save(tmp_path, step)
    rooms, whole = [], os.preadv

    def room(pieces):
        made = FileBuffer(pieces)
        rooms.append(weakref.ref(made))
        return made

    def broken(descriptor, pieces, at):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"step-2/{TENSORS}"):
            raise OSError(errno.EIO, "Input/output error")
        return whole(descriptor, pieces, at)

    monkeypatch.setattr(verified_read, "FileBuffer", room)
    monkeypatch.setattr(os, "preadv", broken)
    once = VerifiedReader()
    good = newest_good(tmp_path, verifies=once.verify)
    ((folder, error),) = good.refused  # which a run holds as long as it lasts
    assert folder.name == "step-2"
    assert "Input/output error" in str(error)
    assert loaded(good.folder, once.take(good.folder)) == 1
    assert [*filter(None, (each() for each in rooms))] == []
    assert rooms


@pytest.mark.parametrize("swapped", ["before", "after"])
def test_a_file_that_is_another_by_now_is_not_what_counts(tmp_path, monkeypatch, swapped):
    """By name it is another one as soon as it is opened; what was opened is read, and is as it was written."""
    folder = folder_of(tmp_path / "step-1", {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)})
    other = folder_of(tmp_path / "other", {"b": torch.full((4,), 1.0), "a": torch.full((4,), 2.0)})
    opens, sums = atomic_directory.open_file, atomic_directory.crc32_of_chunks

    def swap(path):
        if path.name == TENSORS:
            (other / TENSORS).rename(path)

    def opened(path):
        found = opens(path)
        if swapped == "before":
            swap(path)
        return found

    def summed(descriptor, *rest):
        if swapped == "after":
            swap(folder / os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return sums(descriptor, *rest)

    monkeypatch.setattr(atomic_directory, "open_file", opened)
    monkeypatch.setattr(atomic_directory, "crc32_of_chunks", summed)
    found = read_state(folder, taken=taken(folder))
    assert (found["a"][0], found["b"][0]) == (1, 2)


def test_a_head_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    folder, whole = folder_of(tmp_path / "step-1", {"a": torch.ones(4)}), os.pread

    def other(descriptor, size, at):
        return whole(descriptor, size, at).replace(b"a", b"b", 1)

    monkeypatch.setattr(os, "pread", other)
    with raises(DamagedError, code="checkpoint.checksum_differs"):
        VerifiedReader().verify(folder)


def one(shape, size=0, dtype="F32", **more):
    return header({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]} | more}, bytes(size))


ODD = {
    "no elements of more than there are": one([0, 2**64 - 1]),
    "more than there are of no elements": one([2**63, 0]),
    "strides that overflow": one([0, 2**62, 2**62]),
    "sizes below 0": one([-1, -4], 16),
    "sizes that are no numbers": one(["4"], 16),
    "a size that is broken": one([4.0], 16),
    "no sizes": one(None, 16),
    "another type": one([16], 16, "F8_E4M3"),
    "no type": one([4], 16, None),
    "an offset that is broken": one([4], 16, data_offsets=[0, 16.0]),
    "offsets of another length": one([4], 16, data_offsets=[0, 16, 16]),
    "no offsets": one([4], 16, data_offsets=None),
    "bytes that nothing names": one([4], 16, data_offsets=[0, 8]),
    "a gap": header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, bytes(8)),
    "one over the other": header(
        {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"}, bytes(4)
    ),
    "a list": header([1, 2]),
    "a number": header(7),
    "a text for a tensor": header({"a": "b"}),
    "a longer head than is read": struct.pack("<Q", 2**25) + bytes(100),
}


@pytest.mark.parametrize("content", [*BOMBS.values(), *ODD.values()], ids=[*BOMBS, *ODD])
def test_what_is_no_file_of_tensors_is_refused_as_it_is_without(tmp_path, content):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    size = (folder / TENSORS).stat().st_size
    (folder / TENSORS).write_bytes(content.ljust(size, b"1")[:size])  # looked into, as it has the size
    assert gone_on_from(tmp_path)[0] == 1
    forged(folder, content)
    assert taken(folder) is None
    with pytest.raises(FormatError):
        read_state(folder)


@pytest.mark.parametrize("content", [*BOMBS.values(), *ODD.values()], ids=[*BOMBS, *ODD])
def test_no_memory_is_asked_for_by_what_is_odd(tmp_path, monkeypatch, content):
    """Of heads alone that say more than there is, or otherwise; what has no elements takes none."""
    asked = []
    monkeypatch.setattr(verified_read, "_without_values", lambda said: asked.append(said["shape"]) or torch.empty(0))
    folder = save(tmp_path, 1)
    forged(folder, content)
    VerifiedReader().verify(folder)
    assert all(0 in shape for shape in asked)


def test_memory_for_another_size_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    for size in (10, 100_000):
        with pytest.raises(ValueError, match=f"{size} bytes"):
            verify(folder, lambda name, descriptor, _, size=size: FileBuffer([memoryview(bytearray(size))]))


def test_what_was_refused_holds_none_of_those_that_called(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-2" / TREE).write_bytes(b"{}")
    (tmp_path / "step-1" / NAME).write_bytes(b"{}")
    for refused in newest_good(tmp_path).refused:
        assert refused.error.__traceback__ is None
        assert refused.error.__context__ is None


def test_what_the_library_writes_beside_the_tensors_is_passed_over(tmp_path):
    folder = folder_of(tmp_path / "step-1", {"a": torch.ones(2)})
    content = (folder / TENSORS).read_bytes()
    said = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    forged(folder, header({"__metadata__": {"format": "pt"}} | said, content[-8:]))
    assert torch.equal(read_state(folder, taken=taken(folder))["a"], torch.ones(2))


def test_a_folder_without_a_state_is_verified_all_the_same(tmp_path):
    folder = atomic_directory.write(tmp_path, "step-1", lambda it: (it / "x").write_bytes(b"1") and None, {"step": 1})
    assert VerifiedReader().verify(folder) == verify(folder)
    assert taken(folder) is None
