"""Samples of a batch: counted from its containers, split, moved and copied, and unknown where nothing confirms them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import sys
import types
from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from small_loops import sgd
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding

import trimtab
from trimtab.core.errors import BatchError
from trimtab.plans.plan import Plan
from trimtab.training.batch import (
    BY_CONTAINERS,
    BatchSplitting,
    deep_copy,
    samples_at,
    tensors_in,
    to_device,
    versions_of,
    with_new_containers,
)
from trimtab.training.sample_count import read_sample_count

Point = namedtuple("Point", ["x", "y"])
slices = BY_CONTAINERS.slices


def count_rows(batch):
    return BY_CONTAINERS.read(batch).samples


def rows(n, *shape):
    return torch.arange(n * max(1, int(torch.tensor(shape).prod()))).reshape(n, *shape).float()


@st.composite
def batches(draw, n):
    """A nesting of leaves of n rows and of constants; at least one leaf has rows."""
    leaf = st.sampled_from([rows(n), rows(n, 2), rows(n, 2, 3), [f"r{i}" for i in range(n)], list(range(n))])
    constant = st.sampled_from([torch.tensor(3.0), "name", 7, 1.5, None, True, b"x", 1j])
    items = st.sampled_from([[{"i": i, "of": n} for i in range(n)], [(i, "a", *range(9)) for i in range(n)]])
    wrap = lambda inner: st.one_of(  # noqa: E731
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner, st.just(0)),
        st.builds(Point, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
    )
    return draw(leaf), draw(st.recursive(st.one_of(leaf, constant, items), wrap, max_leaves=8))


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def joined(pieces):
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(pieces) if first.dim() else first
    if isinstance(first, dict):
        return type(first)({key: joined([piece[key] for piece in pieces]) for key in first})
    if isinstance(first, tuple):
        parts = [joined(list(part)) for part in zip(*pieces, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return [item for piece in pieces for item in piece] if isinstance(first, list) else first


@given(st.data(), st.integers(1, 9), st.integers(1, 12))
def test_slices_in_order_make_the_batch_again(data, n, micro_batch):
    batch = data.draw(batches(n))
    assert count_rows(batch) == n
    found = list(slices(batch, n, micro_batch))
    assert [size for _, size in found] == [min(micro_batch, n - i) for i in range(0, n, micro_batch)]
    assert all(count_rows(piece) == size for piece, size in found)
    pieces = [piece for piece, _ in found]
    assert {type(piece[1]) for piece in pieces} == {type(batch[1])}
    assert same(joined(pieces), batch)


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_slices_are_views(micro_batch):
    x = rows(6, 2)
    storage = x.untyped_storage().data_ptr()
    assert all(piece.untyped_storage().data_ptr() == storage for piece, _ in slices(x, 6, micro_batch))
    assert next(iter(slices(x, 6, 6)))[0] is next(iter(slices(x, 6, 7)))[0] is x


def test_lists_of_constants_have_a_row_an_item_and_tuples_of_them_none():
    batch = {"x": rows(2), "names": ["a", "b"], "size": (224, 224, 3), "scale": torch.tensor(0.5)}
    pieces = [piece for piece, _ in slices(batch, count_rows(batch), 1)]
    assert [piece["names"] for piece in pieces] == [["a"], ["b"]]
    assert all(piece["size"] == (224, 224, 3) for piece in pieces)
    assert all(piece["scale"] is batch["scale"] for piece in pieces)


LISTS = {
    "dicts": [{"weight": float(i), "name": f"r{i}"} for i in range(8)],
    "tuples": [(i, f"r{i}") for i in range(8)],
    "named tuples": [Point(i, None) for i in range(8)],
    "tensors without dimensions": [torch.tensor(float(i)) for i in range(8)],
}
every_list = pytest.mark.parametrize("items", LISTS.values(), ids=LISTS)


@every_list
def test_a_list_of_an_item_per_row_is_cut_with_the_rows(items):
    batch = {"x": rows(8, 2), "items": items}
    assert count_rows(batch) == 8
    assert [piece["items"] for piece, _ in slices(batch, 8, 3)] == [items[:3], items[3:6], items[6:]]
    assert BY_CONTAINERS.part(batch, 2, 5, 8)["items"] == items[2:5]
    indices = [0, 0, 3, 1, 7, 7, 2, 5]
    assert samples_at(batch, indices)["items"] == [items[index] for index in indices]


@every_list
def test_a_run_hands_out_the_items_of_the_rows_that_it_hands_out(items):
    model, seen = torch.nn.Linear(2, 1), []

    def loss_fn(model, batch):
        assert len(batch[0]) == len(batch[1]) == 4
        seen.extend(batch[1])
        return model(batch[0]).mean()

    with trimtab.start(model, sgd(model), Plan.fixed(8, micro_batch=4)) as run:
        run.train_step(run.window((rows(8, 2), items)), loss_fn)
    assert seen == items


LISTS_WITHOUT_SAMPLES = {
    "a tuple": [(224, 224)],
    "a tensor without dimensions": [torch.tensor(0.5)],
    "more of them": [("a", 1)] * 9,
}


@pytest.mark.parametrize("items", LISTS_WITHOUT_SAMPLES.values(), ids=LISTS_WITHOUT_SAMPLES)
def test_a_list_without_rows_goes_to_every_part_whole(items):
    batch = (rows(8, 2), items)
    assert [part[1] for part, _ in slices(batch, count_rows(batch), 4)] == [items] * 2


def test_texts_as_torch_collates_them_follow_their_samples():
    """A tuple of as many texts as samples, which `default_collate` makes of a text per sample."""
    batch = default_collate([(row, (f"n{row}", f"p{row}")) for row in range(8)])
    assert [part[1] for part, _ in slices(batch, count_rows(batch), 4)] == [
        [tuple(f"{kind}{row}" for row in range(start, start + 4)) for kind in "np"] for start in (0, 4)
    ]


def test_two_columns_of_two_rows_could_be_two_rows_and_are_not_split():
    """Of torch's own collate function: the names of both rows, and the paths of both."""
    batch = default_collate([(0, ("n0", "p0")), (1, ("n1", "p1"))])
    assert (count_rows(batch), BY_CONTAINERS.read(batch).is_splittable) == (2, False)


@pytest.mark.parametrize("micro_batch", [8, 4])
def test_a_run_trains_such_a_batch_whole_with_a_warning_if_the_plan_splits(micro_batch):
    model, batch = torch.nn.Linear(2, 1), (rows(8, 2), [{"size": 224}])
    with trimtab.start(model, sgd(model), Plan.fixed(8, micro_batch)) as run:
        for repeat in range(2):
            is_told = micro_batch == 4 and not repeat
            with pytest.warns(RuntimeWarning, match="count=") if is_told else contextlib.nullcontext():
                window = run.window(batch)
            assert (len(window), window.samples) == (1, 8)
            run.train_step(window, lambda model, part: model(part[0]).mean() * part[1][0]["size"])
        assert run.applied_steps == 2


def test_rows_are_taken_by_index_and_lie_as_those_of_the_batch():
    whole = rows(4, 5)
    batch = {"view": whole[:, :-1], "turned": rows(3, 4).T, "same": whole[:1].expand(4, 5)}
    batch |= {"names": ["a", "b", "c", "d"], "k": 3}
    found = samples_at(batch, [0, 0, 3, 1])
    assert torch.equal(found["view"], whole[[0, 0, 3, 1], :-1])
    assert torch.equal(found["turned"], batch["turned"][[0, 0, 3, 1]])
    assert (found["names"], found["k"]) == (["a", "a", "d", "b"], 3)
    assert torch.equal(found["same"], batch["same"])
    for name in ("view", "turned"):
        assert found[name].stride() == batch[name].stride()


class Graph:
    """A graph of a package that is unknown: nodes, edges, and a `to` of its own."""

    def __init__(self, nodes: int = 5) -> None:
        self.x, self.edges = rows(nodes, 3), torch.zeros(2, 4, dtype=torch.long)

    def to(self, device: Any) -> Graph:
        moved = Graph()
        moved.x, moved.edges = self.x.to(device), self.edges.to(device)
        return moved


@dataclasses.dataclass
class Example:
    x: Any
    y: Any


class Kind(enum.Enum):
    TRAIN = 1


IMAGES = [rows(3, 8, 8), rows(3, 9, 7), rows(3, 8, 8), rows(3, 5, 5)]
BOXES = [{"boxes": rows(number, 4), "labels": torch.zeros(number)} for number in (1, 3, 2, 2)]

KNOWN = {
    "tensor": (rows(4, 2), 4),
    "tuple": ((rows(4, 2), rows(4)), 4),
    "two samples in a list": ([rows(2, 8), rows(2, 8)], 2),
    "one sample": ((rows(1, 3), rows(1)), 1),
    "three sequences in a tuple": ((rows(3, 8, 8), rows(3, 8, 8)), 3),
    "dict": ({"x": rows(4, 2), "y": rows(4)}, 4),
    "constants beside": ({"x": rows(4), "scale": 0.5, "kind": Kind.TRAIN, "path": Path("a"), "none": None}, 4),
    "types and devices beside": ({"x": rows(4), "dtype": torch.float16, "device": torch.device("cpu")}, 4),
    "a size beside": ({"x": rows(4), "size": (224, 224), "shape": torch.Size([4, 4]), "n": np.float32(2)}, 4),
    "empty list beside": ({"x": rows(4), "extra": []}, 4),
    "arrays": ({"x": np.zeros((4, 2)), "y": rows(4)}, 4),
    "an array alone": (np.zeros((4, 2)), 4),
    "texts": (["a", "b", "c"], 3),
    "texts beside labels": ((["a", "b", "c"], rows(3)), 3),
    "texts as collated": ([rows(3, 2), ("a", "b", "c")], 3),
    "lists of numbers": ({"ids": [[1, 2, 3], [4]], "labels": [0, 1]}, 2),
    "lists of lists of one length": ({"ids": [[1, 2, 3], [4]], "labels": [[1], [2, 3]]}, 2),
    "images and targets": ((IMAGES, BOXES), 4),
    "images and targets as tuples": ((tuple(IMAGES), tuple(BOXES)), 4),
    "images and labels": ((IMAGES, rows(4)), 4),
    "pairs of images": ((IMAGES[:2], [rows(1, 8, 8), rows(1, 9, 7)]), 2),
    "one image of equal sizes beside targets": (([rows(3, 8, 8)] * 2, BOXES[:2]), 2),
    "a list of dicts beside a tensor": ({"x": rows(3), "meta": [{"id": 1}, {"id": 2}, {}]}, 3),
    "graphs beside labels": (([Graph(), Graph(2)], rows(2)), 2),
    "columns of columns": ((rows(5), [rows(5, 2), {"z": rows(5)}]), 5),
    "nested pairs": ([[rows(5, 2), rows(5, 3, 8, 8)], [torch.zeros(5).long(), rows(5, 1)]], 5),
    "dataclass": (Example(rows(4), {"deep": rows(4, 2)}), 4),
    "texts beside texts": ((["a", "b", "c"], ["x", "y", "z"]), 3),
    "one text beside another": ((["a"], ["x"]), 1),
    "dicts of no samples beside a tensor": ((rows(2), ({}, {}, 0)), 2),
    "a list of columns": ({"x": rows(4), "columns": [rows(4), rows(4, 3)]}, 4),
    "columns of lists": ({"x": rows(4), "columns": [list("abcd"), list(range(4))]}, 4),
    "columns in dicts": ({"x": rows(4), "columns": [{"deep": rows(4)}] * 3}, 4),
    "columns beside a number": ({"x": rows(4), "columns": [rows(4), 3.0, (1, 2), torch.tensor(0.5)]}, 4),
    "named tuple": (Point(rows(4), rows(4, 2)), 4),
    "ordered dict": (OrderedDict(x=rows(4)), 4),
    "mapping": (types.MappingProxyType({"x": rows(4)}), 4),
    "user dict": (UserDict(x=rows(4)), 4),
    "batch encoding": (BatchEncoding({"ids": rows(4, 7), "mask": rows(4, 7)}), 4),
}


@pytest.mark.parametrize(("batch", "samples"), KNOWN.values(), ids=KNOWN)
def test_samples_that_every_leaf_agrees_on_are_counted_and_split(batch, samples):
    assert read_sample_count(batch).samples == samples
    assert read_sample_count(batch).is_splittable
    pieces = list(BY_CONTAINERS.slices(batch, samples, 1))
    assert [size for _, size in pieces] == [1] * samples
    assert all(type(piece) is type(batch) for piece, _ in pieces)


def test_parts_hold_the_samples_of_their_indices():
    names = tuple("abcd")
    batch = {
        "x": torch.arange(4),
        "y": np.arange(4),
        "names": names,
        "images": IMAGES,
        "targets": BOXES,
        "size": (4, 4),
    }
    first, second = (piece for piece, _ in BY_CONTAINERS.slices(batch, 4, 3))
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1, 2], [3])
    assert (first["y"].tolist(), second["y"].tolist()) == ([0, 1, 2], [3])
    assert (first["names"], second["names"]) == (names[:3], names[3:])
    assert [id(image) for image in (*first["images"], *second["images"])] == [id(image) for image in IMAGES]
    assert all(left is right for left, right in zip((*first["targets"], *second["targets"]), BOXES, strict=True))
    assert first["size"] == second["size"] == (4, 4)


UNKNOWN = {
    "vision and language": {"ids": rows(4, 6), "patches": rows(40, 12)},
    "packed tokens": {"ids": rows(1, 12), "labels": rows(1, 12), "bounds": torch.tensor([0, 5, 12])},
    "packed tokens in one row": {"ids": rows(12), "positions": rows(12), "cu_seqlens": torch.tensor([0, 5, 12])},
    "time first": (rows(7, 4, 3), rows(4)),
    "a graph": Graph(),
    "a graph beside labels": (Graph(), rows(4)),
    "graphs alone": [Graph(), Graph(2)],
    "images alone": IMAGES,
    "images of one size": [rows(3, 8, 8)] * 4,
    "gray images": [rows(1, 8, 8)] * 4,
    "bytes of images": [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 2,
    "images in a dict": {"images": IMAGES},
    "images of one size in a dict": {"images": [rows(3, 8, 8)] * 4},
    "targets alone": BOXES,
    "samples that nobody collated": [(rows(3, 8, 8), torch.tensor(1)), (rows(3, 8, 8), torch.tensor(2))],
    "samples as dicts": [{"x": rows(5)}, {"x": rows(5)}],
    "a packed sequence": pack_sequence([rows(3, 2), rows(2, 2)]),
    "a packed sequence of one": (pack_sequence([rows(3, 2)]), rows(3)),
    "a set": {1, 2},
    "a number": 3,
    "nothing": {},
    "None": None,
    "names that differ": {"x": rows(3), "names": ["a"]},
    "rows or columns": ([rows(5, 2), rows(5, 2)], [rows(5, 2), rows(5, 2)]),
}


@pytest.mark.parametrize("batch", UNKNOWN.values(), ids=UNKNOWN)
def test_samples_that_nothing_confirms_are_unknown_and_the_reason_is_given(batch):
    reading = read_sample_count(batch)
    assert (reading.samples, reading.is_splittable) == (None, False)
    assert reading.reason
    assert reading.code.startswith("samples.")
    with raises(BatchError, code="batch.samples_unknown") as caught:
        BY_CONTAINERS.require(batch)
    assert "count=" in caught.value.hint


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([rows(length, 4) for length in lengths], layout=torch.jagged)


def nested(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([rows(length, 4) for length in lengths])


WHOLE = {
    "jagged": (lambda: (jagged(3, 2, 5), rows(3)), 3),
    "nested of strides": (lambda: {"x": nested(3, 2), "y": rows(2)}, 2),
    "sparse": (lambda: (torch.eye(4).to_sparse(), rows(4)), 4),
    "sparse rows": (lambda: (torch.eye(4).to_sparse_csr(), rows(4)), 4),
    "as many images as channels": (lambda: (IMAGES[:3], BOXES[:3]), 3),
    "square lists": (lambda: {"x": rows(3), "grid": [[1, 2, 3]] * 3}, 3),
    "as many columns as samples": (lambda: {"x": rows(4), "columns": [rows(4)] * 4}, 4),
    "as many dicts of columns": (lambda: {"x": rows(4), "columns": [{"deep": rows(4)}] * 4}, 4),
    "fewer dicts than samples": (lambda: {"x": rows(8, 2), "items": [{"size": 224}] * 3}, 8),
    "more dicts than samples": (lambda: {"x": rows(8, 2), "items": [{"size": 224}] * 9}, 8),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("make", "samples"), WHOLE.values(), ids=WHOLE)
def test_known_samples_that_cannot_be_sliced_go_whole(make, samples):
    batch = make()
    assert (read_sample_count(batch).samples, read_sample_count(batch).is_splittable) == (samples, False)
    assert next(BY_CONTAINERS.slices(batch, samples, samples))[0] is batch
    for split in (lambda: next(BY_CONTAINERS.slices(batch, samples, 1)), lambda: samples_at(batch, [0])):
        with raises(BatchError, code="batch.not_splittable") as caught:
            split()
        assert "split=" in caught.value.hint


# The user's functions.


def count_patients(batch):
    return len(batch["ids"])


def split_patients(batch, start, stop):
    each = len(batch["patches"]) // len(batch["ids"])
    return {"ids": batch["ids"][start:stop], "patches": batch["patches"][start * each : stop * each]}


def test_functions_of_the_user_count_and_split():
    batching = BatchSplitting(count_patients, split_patients)
    batch = UNKNOWN["vision and language"]
    assert batching.read(batch) == (4, True, "", "")
    sizes = [(len(part["ids"]), len(part["patches"]), size) for part, size in batching.slices(batch, 4, 3)]
    assert sizes == [(3, 30, 3), (1, 10, 1)]


def test_a_count_without_a_split_splits_only_what_the_containers_show():
    assert BatchSplitting(count=len).read((rows(2, 5), rows(2))) == (2, True, "", "")
    reading = BatchSplitting(count=lambda batch: 4).read((rows(7, 4, 3), rows(4)))
    assert (reading.samples, reading.is_splittable) == (4, False)
    assert reading.code == "samples.count_differs"
    with raises(BatchError, code="batch.not_splittable"):
        next(BatchSplitting(count=lambda batch: 4).slices((rows(7, 4, 3), rows(4)), 4, 2))


@pytest.mark.parametrize("found", [0, -1, 2.0, "2", None, True, torch.tensor(2)])
def test_a_count_that_is_no_positive_int_is_refused(found):
    with raises(BatchError, code="batch.count_invalid", field="count"):
        BatchSplitting(count=lambda batch: found).read(rows(2))


def fails(*given):
    raise KeyError("ids")


def test_functions_that_raise_are_typed_errors():
    for code, call in (
        ("batch.count_failed", lambda: BatchSplitting(count=fails).read(rows(2))),
        ("batch.split_failed", lambda: next(BatchSplitting(split=fails).slices(rows(4), 4, 2))),
        ("batch.split_invalid", lambda: next(BatchSplitting(len, lambda batch, *_: batch).slices(rows(4), 4, 2))),
    ):
        with raises(BatchError, code=code):
            call()


@pytest.mark.parametrize("name", ["count", "split"])
@pytest.mark.parametrize("value", [3, "len", []])
def test_functions_that_cannot_be_called_are_refused(name, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        BatchSplitting(**{name: value})
    assert caught.value.code == f"{name}.not_callable"


# Containers and devices.


def test_objects_of_unknown_classes_move_by_their_own_method():
    batch = {"graph": Graph(), "y": rows(4), "names": ["a"], "pair": Point(rows(3), None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["graph"].x.device.type == moved["y"].device.type == "meta"
    assert (moved["pair"].x.device.type, moved["pair"].y, moved["names"]) == ("meta", None, ["a"])
    assert batch["graph"].x.device.type == batch["y"].device.type == "cpu"
    assert to_device({"x": batch["y"]}, torch.device("cpu"))["x"] is batch["y"]


def test_a_move_that_fails_is_a_typed_error():
    class Stuck:
        def to(self, device):
            raise RuntimeError("no such device")

    with raises(BatchError, code="batch.move_failed"):
        to_device({"x": rows(2), "stuck": Stuck()}, torch.device("meta"))


CONTAINERS = {
    "dict": lambda: {"x": rows(2), "inner": {"names": ["a", "b"]}},
    "ordered dict": lambda: OrderedDict(x=rows(2), inner=["a"]),
    "user dict": lambda: UserDict(x=rows(2), inner={}),
    "batch encoding": lambda: BatchEncoding({"x": rows(2), "inner": rows(2)}),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_fresh_containers_hold_the_same_tensors(make):
    batch = make()
    given = with_new_containers(batch)
    assert type(given) is type(batch)
    assert given["x"] is batch["x"]
    given.pop("x")
    given["new"] = 3
    assert set(batch.keys()) == {"x", "inner"}


def test_nested_containers_are_fresh_and_tuples_of_tensors_stay():
    inner = {"names": ["a"]}
    given = with_new_containers((inner, [rows(2)]))
    given[0]["names"].append("b")
    given[0].pop("names")
    given[1].clear()
    assert inner == {"names": ["a"]}
    pair = rows(2), rows(2)
    assert with_new_containers(pair) is pair
    example = Example({"x": rows(2)}, [1, 2])
    given = with_new_containers(example)
    given.x.pop("x")
    given.y = None
    assert (list(example.x), example.y) == (["x"], [1, 2])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_copies_share_no_memory():
    batch = {
        "x": rows(2),
        "y": np.zeros(2),
        "graph": Graph(),
        "nested": jagged(2, 3),
        "needs": rows(2).requires_grad_(),
    }
    given = deep_copy(batch)
    given["x"].zero_()
    given["y"] += 1
    given["graph"].x.zero_()
    assert batch["x"].any()
    assert not batch["y"].any()
    assert batch["graph"].x.any()
    assert given["needs"].requires_grad
    assert given["needs"].is_leaf


def test_tensors_of_unknown_objects_are_seen_and_so_are_their_versions():
    batch = {"graph": Graph(), "y": rows(4)}
    assert len(list(tensors_in(batch))) == 3
    before = versions_of(batch)
    batch["graph"].x.mul_(2)
    assert versions_of(batch) != before


# Long lists.

LONG = {
    "texts of words": lambda number: [["a"] * 30 for _ in range(number)],
    "numbers in three levels": lambda number: [[[1.0] * 5] * 6 for _ in range(number)],
    "texts": lambda number: ["a"] * number,
    "dicts": lambda number: [{"id": index, "name": "a"} for index in range(number)],
    "tuples": lambda number: [(index, "a") for index in range(number)],
    "tuples of texts": lambda number: tuple(("a", "b", "c") for _ in range(number)),
}


def calls_of(function):
    """Return the number of calls of Python functions that a function makes."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("make", [LONG[name] for name in LONG if "levels" not in name])
def test_the_items_of_a_long_list_are_not_looked_at_one_by_one(make):
    def step():
        assert read_sample_count(batch) == (number, True, "", "")
        assert to_device(batch, torch.device("cpu")) is batch
        assert versions_of(batch)[0] == 0

    found = []
    for number in (1024, 4096):
        batch = {"x": rows(number, 2), "long": make(number)}
        assert with_new_containers(batch)["long"] == batch["long"]
        found.append(calls_of(step))
    assert found[1] <= found[0] + 50 < 1024


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"x": x}], ids=["bare", "list", "dict"])
def test_a_tensor_among_the_items_of_a_long_list_is_found(make, wrap):
    batch = list(make(600))
    batch[333] = wrap(rows(3))
    assert len(list(tensors_in(batch))) == 1
    assert {each.device.type for each in tensors_in(to_device(batch, torch.device("meta")))} == {"meta"}
    assert next(tensors_in(with_new_containers(batch))) is next(tensors_in(batch))


@pytest.mark.parametrize("inner", [["a"] * 3, {"a": 1}, [["a"]], [{"a": [1]}], ({"a": 1},)], ids=str)
def test_containers_in_long_lists_are_fresh(inner):
    def containers(value):
        yield id(value)
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, list | dict | tuple):
                yield from containers(item)

    batch = [copy.deepcopy(inner) for _ in range(600)]
    given = with_new_containers(batch)
    assert given == batch
    assert not set(containers(given)) & set(containers(batch))


def test_a_list_of_sparse_samples_is_split_between_them():
    batch = rows(3, 2), [torch.eye(4).to_sparse()] * 3
    assert read_sample_count(batch) == (3, True, "", "")
    assert [len(part[1]) for part, _ in BY_CONTAINERS.slices(batch, 3, 2)] == [2, 1]


INNER = {
    "lists": (lambda: ["a", "b"], lambda item: item.append("c")),
    "lists of as many": (lambda: ["a", "b"], lambda item: item.reverse()),
    "dicts": (lambda: {"id": 1}, lambda item: item.update(seen=True)),
}


def trained(batch, loss_fn, windows=6, **options):
    model = torch.nn.Linear(2, 1)
    with trimtab.start(model, sgd(model), Plan.fixed(32), **options) as run:
        for _ in range(windows):
            run.train_step(run.window(batch), loss_fn)


@pytest.mark.parametrize("is_tuple", [False, True])
@pytest.mark.parametrize(("make", "change"), INNER.values(), ids=INNER)
def test_a_loss_that_changes_lists_in_long_lists_gets_copies_in_every_step(make, change, is_tuple):
    def loss_fn(model, given):
        assert all(item == make() for item in given["long"])
        for item in given["long"]:
            change(item)
        return model(given["x"]).mean()

    items = [make() for _ in range(32)]
    trained({"x": rows(32, 2), "long": tuple(items) if is_tuple else items}, loss_fn)
    assert items == [make() for _ in range(32)]
