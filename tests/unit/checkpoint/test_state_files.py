"""Tensors and arrays of a state: bit for bit, each memory once, and read as they were verified; nothing that runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import sys
import weakref
from collections import Counter, defaultdict
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from saving import gone_on_from, loaded, newest_good, save, write
from torch import nn

from trimtab.checkpoint import atomic_directory, state_files
from trimtab.checkpoint.atomic_directory import NAME, TENSORS, TREE, FileBuffer, verify, write_manifest
from trimtab.checkpoint.state_files import Packer, StateFiles, digest_of, read_state, snapshot, write_state
from trimtab.core.errors import DamagedError, DependencyError, FormatError, SaveError

BITS = torch.tensor(range(256), dtype=torch.uint8)
TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def back(folder, state):
    write_state(folder, state)
    return read_state(folder)


def bits(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_same(found, expected):
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert bits(found) == bits(expected)


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_what_has_no_gaps_comes_back_in_its_own_layout(tmp_path_factory, order, shape):
    tensor = torch.arange(float(np.prod(shape))).reshape([shape[d] for d in order]).permute(np.argsort(order).tolist())
    found = back(tmp_path_factory.mktemp("layout"), [tensor])[0]
    assert_same(found, tensor)
    assert [s for s, n in zip(found.stride(), shape, strict=True) if n > 1] == [
        s for s, n in zip(tensor.stride(), shape, strict=True) if n > 1
    ]


def test_channels_last_stays_it(tmp_path):
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert back(tmp_path, [tensor])[0].is_contiguous(memory_format=torch.channels_last)


def test_views_with_gaps_are_written_alone(tmp_path):
    whole = torch.arange(2.0**16).reshape(256, 256)
    state = [whole[1, ::2], whole[:, 3], torch.tensor(2.0).expand(5), torch.view_as_complex(whole[:2, :2]).conj()]
    for found, expected in zip(back(tmp_path, state), state, strict=True):
        assert_same(found, expected.resolve_conj())
    assert (tmp_path / TENSORS).stat().st_size < 4_000


def test_what_is_one_memory_is_written_once_and_comes_back_as_one(tmp_path):
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 50, bias=False))
    model[1].weight = model[0].weight
    found = back(tmp_path, {"model": model.state_dict(), "again": [model[0].weight, nn.Parameter(torch.ones(2))]})
    weights = [*found["model"].values(), found["again"][0]]
    assert weights[0] is weights[1] is weights[2]
    assert (tmp_path / TENSORS).stat().st_size < 50 * 40 * 4 + 1_000
    weights[0].zero_()  # memory of their own
    assert read_state(tmp_path)["model"]["0.weight"].any()


def test_what_becomes_of_the_file_is_nothing_to_what_was_read(tmp_path):
    found = back(tmp_path, [torch.ones(10_000)])[0]
    with (tmp_path / TENSORS).open("r+b") as file:
        file.write(bytes(50_000))
    os.truncate(tmp_path / TENSORS, 0)
    assert torch.equal(found, torch.ones(10_000))


def test_views_of_one_memory_that_differ_in_shape_or_type_are_each_written(tmp_path):
    flat = torch.arange(8.0)
    state = [flat, flat.view(2, 4), flat.view(torch.int32), flat.view(4, 2).t(), flat[:0], flat.view(2, 4)[:, :0]]
    state += [flat[:4], flat[4:]]
    for found, expected in zip(back(tmp_path, state), state, strict=True):
        assert_same(found, expected)


def test_who_may_read_one_file_may_read_the_other(tmp_path):
    before = os.umask(0o027)
    try:
        write_state(tmp_path, {"a": torch.ones(1)})
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}


def test_nothing_but_numbers(tmp_path):
    assert back(tmp_path, {"a": 1, "b": (1.5, None)}) == {"a": 1, "b": (1.5, None)}


def test_names_that_look_alike_stay_apart(tmp_path):
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2), "": [torch.ones(3)]}
    found = back(tmp_path, state)
    assert [each.tolist() for each in (found["a.b"], found["a"]["b"], found["__metadata__"])] == [[1], [0], [1, 1]]


@pytest.mark.parametrize("code", "?bhilBHILefd")
def test_arrays_and_their_scalars(tmp_path, code):
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(code)
    array.flags.writeable = False
    state = {"turned": array.T, "scalar": array[1, 2], "empty": array[:0], "point": np.array(array[0, 1])}
    found = back(tmp_path, state)
    for name, each in state.items():
        assert type(found[name]) is type(each)
        assert found[name].dtype == each.dtype
        assert found[name].shape == each.shape
        assert found[name].tobytes() == each.tobytes()


def test_numpys_generators_go_on(tmp_path):
    legacy, generator = np.random.RandomState(3), np.random.default_rng(5)
    legacy.standard_normal()
    found = back(tmp_path, {"legacy": legacy.get_state(), "new": generator.bit_generator.state})
    others = np.random.RandomState(), np.random.default_rng()
    others[0].set_state(found["legacy"])
    others[1].bit_generator.state = found["new"]
    assert (others[0].standard_normal(5) == legacy.standard_normal(5)).all()
    assert (others[1].standard_normal(5) == generator.standard_normal(5)).all()


class Own(torch.Tensor):
    """A tensor of the user's own kind."""


@pytest.mark.parametrize(
    ("value", "code", "got"),
    [
        (torch.ones(2).to_sparse(), "state.unsupported_tensor", "sparse"),
        (torch.ones(2, device="meta"), "state.unsupported_tensor", "meta"),
        (torch.ones(2).as_subclass(Own), "state.unsupported_type", "Own"),
        (np.array(["a"]), "state.unsupported_array", "<U1"),
        (np.array([object()]), "state.unsupported_array", "O"),
        (np.zeros(2, dtype=">f4"), "state.unsupported_array", ">f4"),
        (np.datetime64("2026-01-01"), "state.unsupported_array", "<M8[D]"),
    ],
)
def test_what_holds_no_numbers_is_refused_by_its_place(tmp_path, value, code, got):
    with raises(FormatError, code=code, field="state['a'][1]") as refused:
        write_state(tmp_path, {"a": [0, value]})
    assert got in refused.value.got


def test_a_snapshot_does_not_follow_the_training():
    tied, array = torch.randn(3, 2).t(), np.ones(2)
    state = {"a": tied, "b": [tied.detach(), (array,)], "c": 1}  # other objects of one memory, as a state_dict's are
    before = deepcopy(state)
    taken = snapshot(state)
    tied.zero_()
    array[:] = 0
    assert taken["a"] is taken["b"][0]
    assert taken["a"].stride() == before["a"].stride()
    assert torch.equal(taken["a"], before["a"])
    assert taken["b"][1][0].tolist() == [1, 1]


def test_a_snapshot_has_its_mappings_in_their_own_kinds():
    state = {"a": Counter({3: 1}), "b": [defaultdict(list, {"x": [torch.ones(1)]})], "c": {}}
    taken = snapshot(state)
    assert [type(each) for each in (taken["a"], taken["b"][0], taken["c"])] == [Counter, defaultdict, dict]
    assert taken["a"] == state["a"]
    assert taken["a"] is not state["a"]
    assert taken["b"][0].default_factory is list
    assert taken["b"][0]["x"][0] is not state["b"][0]["x"][0]


def test_states_have_one_digest_where_they_are_alike_to_the_bit():
    state = {"a": torch.tensor([0.0, 1.0]), "b": torch.ones(0, 3), "c": torch.ones(2, dtype=torch.bfloat16), "d": 1}
    others = [
        state | {"a": torch.tensor([-0.0, 1.0])},
        state | {"a": torch.tensor([0.0, 1.0], dtype=torch.float64)},
        state | {"a": torch.tensor([[0.0], [1.0]])},
        state | {"b": torch.ones(3, 0)},
        state | {"c": torch.zeros(2, dtype=torch.bfloat16)},
        state | {"d": 1.0},
    ]
    assert digest_of(deepcopy(state)) == digest_of(state)
    assert len({digest_of(each) for each in (state, *others)}) == 7


def lying(folder, change):
    """Write a state whose JSON says otherwise."""
    write_state(folder, {"a": torch.arange(6.0).reshape(2, 3)})
    packed = json.loads((folder / TREE).read_text())
    change(packed["map"][0][1]["tensor"])
    (folder / TREE).write_text(json.dumps(packed))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 2]},
        {"shape": [6]},
        {"shape": [2**40]},
        {"shape": [-2, -3]},
        {"shape": "23"},
        {"shape": [2.0, 3.0]},
        {"type": "int32"},
        {"type": "complex64", "shape": [3]},
        {"type": "uint16", "shape": [2**45]},
        {"type": "load"},
        {"type": "__class__"},
        {"order": [0]},
        {"order": [0, 0]},
        {"order": [1, 0]},
        {"order": 3},
        {"name": "another"},
        {"name": None},
    ],
    ids=str,
)
def test_json_that_says_otherwise_than_the_file_is_refused(tmp_path, change):
    lying(tmp_path, lambda packed: packed.update(change))
    with raises(FormatError, code="state.malformed", field="state['a']"):
        read_state(tmp_path)


def test_a_tensor_that_nothing_names_is_refused(tmp_path):
    lying(tmp_path, lambda packed: None)
    (tmp_path / TREE).write_text(json.dumps({"map": []}))
    with raises(FormatError, code="state.malformed", field="state"):
        read_state(tmp_path)


def header(data, rest=b""):
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return struct.pack("<Q", len(text)) + text + rest


BOMBS = {
    "nothing": b"",
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "a tensor of a terabyte": header({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}),
    "a shape of a terabyte": header({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 4]}}, b"1234"),
    "sizes that overflow": header({"a": {"dtype": "F32", "shape": [2**33, 2**33], "data_offsets": [0, 4]}}, b"1234"),
    "offsets turned round": header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}, b"1234"),
    "levels without end": header(b'{"a":' + b"[" * 100_000),
    "no JSON": header(b"\x80\x04pickle"),
}


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1", b"[" * 100_000, b'{"list":' * 5_000 + b"0" + b"}" * 5_000])
def test_json_that_is_none_is_refused(tmp_path, content):
    lying(tmp_path, lambda packed: None)
    (tmp_path / TREE).write_bytes(content)
    with pytest.raises(FormatError):
        read_state(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with raises(SaveError, code="checkpoint.not_saved", field=str(tmp_path / "none" / TENSORS)):
        write_state(tmp_path / "none", {"a": torch.ones(1)})
    with raises(FormatError, code="state.unreadable", field=str(tmp_path / "none" / TREE)):
        read_state(tmp_path / "none")


def test_without_the_library_the_way_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with raises(DependencyError, code="dependency.missing", field="checkpoints"):
        write_state(tmp_path, {"a": torch.ones(1)})


def test_tensors_that_were_met_keep_their_addresses():
    packer = Packer()
    names = {json.dumps(packer.pack(torch.full((64,), float(i)))) for i in range(50)}
    assert len(names) == len(packer.tensors) == 50
    assert sorted(float(each[0]) for each in packer.tensors.values()) == [*map(float, range(50))]


def folder_of(path, state, step=1):
    path.mkdir()
    write_state(path, state)
    write_manifest(path, {"step": step})
    return path


def verified(folder):
    """Return the state of a folder, as it was verified."""
    return read_state(folder, files=StateFiles.verified(folder))


def forged(folder, content):
    """Put a file of tensors into a folder, as one who can write there does."""
    (folder / TENSORS).write_bytes(content)
    (folder / NAME).unlink()
    write_manifest(folder, {"step": 1})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_bit_of_every_type_and_size(tmp_path):
    of_types = {str(dtype): BITS.view(dtype).reshape(2, -1) for dtype in TYPES}  # infinities, NaN, negative zeros
    state = of_types | {f"scalar {name}": each[0, 0].clone() for name, each in of_types.items()}
    state |= {f"empty {name}": each.reshape(2, 1, -1)[:, :0] for name, each in of_types.items()}
    state |= {"truth": torch.tensor([True, False, True]), "none": torch.ones(3, 0), "one": torch.tensor(2.5)}
    state |= {f"odd {size}": torch.arange(size, dtype=torch.uint8) for size in range(1, 20)}
    folder = folder_of(tmp_path / "step-1", state)
    files, expected = StateFiles.verified(folder), read_state(folder)
    for name in (TENSORS, TREE):
        (folder / name).unlink()  # what was verified is what counts, whatever becomes of the files
    found = read_state(folder, files=files)
    assert found.keys() == expected.keys() == state.keys()
    for name, each in state.items():
        assert_same(found[name], each)
        assert_same(expected[name], each)


def test_thousands_of_tensors(tmp_path):
    state = [torch.full((index % 7,), float(index)) for index in range(3_000)]
    folder = folder_of(tmp_path / "step-1", state)
    for found, expected in zip(verified(folder), state, strict=True):
        assert_same(found, expected)


def test_each_tensor_has_memory_of_its_own(tmp_path):
    folder = folder_of(tmp_path / "step-1", {"a": torch.ones(1000), "b": torch.ones(10)})
    for tensor in verified(folder).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # one that is kept does not keep the others
        assert tensor.data_ptr() % 64 == 0  # as any other: how sums are rounded may hang upon it


def test_the_default_device_is_nothing_to_it(tmp_path):
    folder = folder_of(tmp_path / "step-1", {"a": torch.ones(4)})
    with torch.device("meta"):
        files = StateFiles.verified(folder)
    assert torch.equal(read_state(folder, files=files)["a"], torch.ones(4))


def test_nothing_is_to_be_had_of_what_was_damaged(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    folder = tmp_path / "step-2"
    for name in (TENSORS, TREE, "shard.bin"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with raises(DamagedError, code="checkpoint.checksum_differs", field=str(folder / name)):
            StateFiles.verified(folder)
        assert gone_on_from(tmp_path)[0] == 1
        (folder / name).write_bytes(content)


def test_what_cannot_be_read_holds_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_directory, "CHUNK_BYTES", 4096)  # so that threads read it
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

    monkeypatch.setattr(state_files, "FileBuffer", room)
    monkeypatch.setattr(os, "preadv", broken)
    good = atomic_directory.newest_good(tmp_path, StateFiles.verified)
    ((folder, error),) = good.refused  # which a run holds as long as it lasts
    assert folder.name == "step-2"
    assert "Input/output error" in str(error)
    assert loaded(good.folder, good.contents) == 1
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

    @contextlib.contextmanager
    def opened(path):
        with opens(path) as found:
            if swapped == "before":
                swap(path)
            yield found

    def summed(descriptor, *rest):
        if swapped == "after":
            swap(folder / os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return sums(descriptor, *rest)

    monkeypatch.setattr(atomic_directory, "open_file", opened)
    monkeypatch.setattr(atomic_directory, "crc32_of_chunks", summed)
    found = verified(folder)
    assert (found["a"][0], found["b"][0]) == (1, 2)


def test_a_head_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    folder, whole = folder_of(tmp_path / "step-1", {"a": torch.ones(4)}), os.pread

    def other(descriptor, size, at):
        return whole(descriptor, size, at).replace(b"a", b"b", 1)

    monkeypatch.setattr(os, "pread", other)
    with raises(DamagedError, code="checkpoint.checksum_differs"):
        StateFiles.verified(folder)


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
    for read in (verified, read_state):
        with raises(FormatError, code="state.unreadable"):
            read(folder)


@pytest.mark.parametrize("content", [*BOMBS.values(), *ODD.values()], ids=[*BOMBS, *ODD])
def test_no_memory_is_asked_for_by_what_is_odd(tmp_path, monkeypatch, content):
    """Of heads alone that say more than there is, or otherwise; what has no elements takes none."""
    asked = []
    monkeypatch.setattr(state_files, "_without_values", lambda said: asked.append(said["shape"]) or torch.empty(0))
    folder = save(tmp_path, 1)
    forged(folder, content)
    StateFiles.verified(folder)
    assert all(0 in shape for shape in asked)


def test_what_was_refused_holds_none_of_those_that_called(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-2" / TREE).write_bytes(b"{}")
    (tmp_path / "step-1" / NAME).write_bytes(b"{}")
    for _, error in newest_good(tmp_path).refused:
        assert error.__traceback__ is None
        assert error.__context__ is None


def test_what_the_library_writes_beside_the_tensors_is_passed_over(tmp_path):
    folder = folder_of(tmp_path / "step-1", {"a": torch.ones(2)})
    content = (folder / TENSORS).read_bytes()
    said = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    forged(folder, header({"__metadata__": {"format": "pt"}} | said, content[-8:]))
    assert torch.equal(verified(folder)["a"], torch.ones(2))


def test_a_folder_without_a_state_is_verified_all_the_same(tmp_path):
    folder = write(tmp_path, "step-1", lambda it: (it / "x").write_bytes(b"1"), {"step": 1})
    assert StateFiles.verified(folder).manifest == verify(folder)
    with raises(FormatError, code="state.unreadable"):
        verified(folder)
