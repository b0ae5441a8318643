"""Number of samples of a batch: read from its containers, never guessed, and unknown where nothing confirms it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

import trimtab
from trimtab.core.errors import BatchError
from trimtab.plans.plan import Plan
from trimtab.training.batch import (
    BY_CONTAINERS,
    BatchSplitting,
    deep_copy,
    tensors_in,
    to_device,
    versions_of,
    with_new_containers,
)
from trimtab.training.sample_count import read_sample_count


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


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
    with pytest.raises(BatchError) as caught:
        BY_CONTAINERS.require(batch)
    assert caught.value.code == "batch.samples_unknown"
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
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("make", "samples"), WHOLE.values(), ids=WHOLE)
def test_known_samples_that_cannot_be_sliced_go_whole(make, samples):
    batch = make()
    assert (read_sample_count(batch).samples, read_sample_count(batch).is_splittable) == (samples, False)
    assert next(BY_CONTAINERS.slices(batch, samples, samples))[0] is batch
    with pytest.raises(BatchError) as caught:
        next(BY_CONTAINERS.slices(batch, samples, 1))
    assert caught.value.code == "batch.not_splittable"


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
    with pytest.raises(BatchError) as caught:
        next(BatchSplitting(count=lambda batch: 4).slices((rows(7, 4, 3), rows(4)), 4, 2))
    assert caught.value.code == "batch.not_splittable"


@pytest.mark.parametrize("found", [0, -1, 2.0, "2", None, True, torch.tensor(2)])
def test_a_count_that_is_no_positive_int_is_refused(found):
    with pytest.raises(BatchError) as caught:
        BatchSplitting(count=lambda batch: found).read(rows(2))
    assert (caught.value.code, caught.value.field) == ("batch.count_invalid", "count")


def fails(*given):
    raise KeyError("ids")


def test_functions_that_raise_are_typed_errors():
    with pytest.raises(BatchError) as caught:
        BatchSplitting(count=fails).read(rows(2))
    assert caught.value.code == "batch.count_failed"
    with pytest.raises(BatchError) as caught:
        next(BatchSplitting(split=fails).slices(rows(4), 4, 2))
    assert caught.value.code == "batch.split_failed"


def test_a_split_of_another_size_is_refused():
    batching = BatchSplitting(count=len, split=lambda batch, start, stop: batch)
    with pytest.raises(BatchError) as caught:
        next(batching.slices(rows(4), 4, 2))
    assert caught.value.code == "batch.split_invalid"


@pytest.mark.parametrize("name", ["count", "split"])
@pytest.mark.parametrize("value", [3, "len", []])
def test_functions_that_cannot_be_called_are_refused(name, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        BatchSplitting(**{name: value})
    assert caught.value.code == f"{name}.not_callable"


# Containers and devices.


def test_objects_of_unknown_classes_move_by_their_own_method():
    batch = {"graph": Graph(), "y": rows(4)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["graph"].x.device.type == moved["y"].device.type == "meta"
    assert batch["graph"].x.device.type == "cpu"


def test_a_move_that_fails_is_a_typed_error():
    class Stuck:
        def to(self, device):
            raise RuntimeError("no such device")

    with pytest.raises(BatchError) as caught:
        to_device({"x": rows(2), "stuck": Stuck()}, torch.device("meta"))
    assert caught.value.code == "batch.move_failed"


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


def test_a_dataclass_is_fresh_too():
    batch = Example({"x": rows(2)}, [1, 2])
    given = with_new_containers(batch)
    given.x.pop("x")
    given.y = None
    assert list(batch.x) == ["x"]
    assert batch.y == [1, 2]


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
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(32), **options) as run:
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


@pytest.mark.parametrize("make", [make for make, _ in INNER.values()], ids=INNER)
def test_a_loss_that_leaves_lists_in_long_lists_gets_copies_in_few_steps(make):
    def loss_fn(model, given):
        assert given["long"] is not batch["long"]
        are_copied.append(given["long"][5] is not batch["long"][5])
        return model(given["x"]).mean()

    batch, are_copied = {"x": rows(32, 2), "long": [make() for _ in range(32)]}, []
    trained(batch, loss_fn, windows=9)
    assert [index + 1 for index, is_copied in enumerate(are_copied) if is_copied] == [1, 2, 4, 8]


def test_a_step_that_changed_the_lists_of_its_batch_first_is_not_repeated():
    def loss_fn(model, given):
        calls.append(len(given["x"]))
        if len(calls) == 3:
            given["long"][0].append("c")
            raise torch.OutOfMemoryError("no")
        return model(given["x"]).mean()

    calls, batch = [], {"x": rows(32, 2), "long": [["a", "b"] for _ in range(32)]}
    with pytest.raises(torch.OutOfMemoryError):
        trained(batch, loss_fn, out_of_memory="split")
    assert calls == [32] * 3
