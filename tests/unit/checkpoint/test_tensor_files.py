"""A file of tensors that is verified and read at once holds the same as one that is read alone."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from test_tensors import BITS, BOMBS, TYPES, assert_same

from trimtab.checkpoint.envelope import newest_good, seal, verify
from trimtab.checkpoint.file_names import TENSORS, TREE
from trimtab.checkpoint.manifest import NAME
from trimtab.checkpoint.state_files import read_state, write_state
from trimtab.checkpoint.tensor_files import ReadOnce
from trimtab.core.errors import DamagedError, FormatError


def folder_of(path, state, step=1):
    path.mkdir()
    write_state(path, state)
    seal(path, {"step": step})
    return path


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_bit_of_every_type_and_size(tmp_path):
    state = {str(dtype): BITS.view(dtype).reshape(2, -1) for dtype in TYPES}
    state |= {"truth": torch.tensor([True, False, True]), "none": torch.ones(3, 0), "one": torch.tensor(2.5)}
    state |= {f"odd {size}": torch.arange(size, dtype=torch.uint8) for size in range(1, 20)}
    folder, once = folder_of(tmp_path / "step-1", state), ReadOnce(TENSORS)
    verify(folder, once.room)
    expected = read_state(folder)
    (folder / TENSORS).unlink()  # what was verified is what counts, whatever becomes of the file
    found = read_state(folder, "", once.read)
    assert found.keys() == expected.keys() == state.keys()
    for name, each in state.items():
        assert_same(found[name], each)
        assert_same(expected[name], each)


def test_each_tensor_has_memory_of_its_own(tmp_path):
    folder, once = folder_of(tmp_path / "step-1", {"a": torch.ones(1000), "b": torch.ones(10)}), ReadOnce(TENSORS)
    verify(folder, once.room)
    for tensor in read_state(folder, "", once.read).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # one that is kept does not keep the others
        assert tensor.data_ptr() % 64 == 0  # as any other: how sums are rounded may hang upon it


def test_it_is_given_once_and_read_from_the_file_after_that(tmp_path):
    folder, once = folder_of(tmp_path / "step-1", {"a": torch.ones(4)}), ReadOnce(TENSORS)
    verify(folder, once.room)
    read_state(folder, "", once.read)["a"].zero_()
    assert torch.equal(read_state(folder, "", once.read)["a"], torch.ones(4))


def test_of_several_folders_it_has_the_last(tmp_path):
    folders = [folder_of(tmp_path / f"step-{step}", {"a": torch.full((4,), float(step))}, step) for step in (1, 2)]
    once = ReadOnce(TENSORS)
    for folder in folders:
        verify(folder, once.room)
    assert [read_state(folder, "", once.read)["a"][0] for folder in folders] == [1, 2]
    assert read_state(folders[1], "", once.read)["a"][0] == 2


def test_one_that_was_damaged_leaves_nothing_of_it(tmp_path):
    for step in (1, 2):
        folder_of(tmp_path / f"step-{step}", {"a": torch.full((4,), float(step))}, step)
    path, once = tmp_path / "step-2" / TENSORS, ReadOnce(TENSORS)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    good = newest_good(tmp_path, rooms=once.room)
    assert good.folder == tmp_path / "step-1"
    assert read_state(good.folder, "", once.read)["a"][0] == 1


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_what_is_no_file_of_tensors_is_refused_as_it_is_without(tmp_path, content):
    folder, once = folder_of(tmp_path / "step-1", {"a": torch.ones(4)}), ReadOnce(TENSORS)
    (folder / TENSORS).write_bytes(content)
    with pytest.raises(DamagedError, match=TENSORS):
        verify(folder, once.room)
    (folder / NAME).unlink()
    seal(folder, {"step": 1})  # as one who forges does
    verify(folder, once.room)
    with pytest.raises(FormatError, match=TENSORS):
        read_state(folder, "", once.read)


def test_types_that_we_never_write_are_refused_as_without(tmp_path):
    folder, once = folder_of(tmp_path / "step-1", {"a": torch.ones(1)}), ReadOnce(TENSORS)
    said = json.dumps({"0 a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / TENSORS).write_bytes(struct.pack("<Q", len(said)) + said + b"1234")
    (folder / NAME).unlink()
    seal(folder, {"step": 1})
    verify(folder, once.room)
    for read in ((), ("", once.read)):
        with pytest.raises(FormatError, match="state"):
            read_state(folder, *read)


def test_other_files_are_not_taken(tmp_path):
    folder, once = folder_of(tmp_path / "step-1", {"a": torch.ones(4)}), ReadOnce(TENSORS)
    assert once.room(folder / TREE, 10) is None
    assert once.room(folder / TENSORS, 3) is None  # of a file that is another by now
    assert torch.equal(read_state(folder, "", once.read)["a"], torch.ones(4))
