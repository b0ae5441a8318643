"""Rows are counted, sliced and moved in any nesting, and refused where that would be a guess."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, namedtuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import BatchError
from trimtab.runtime.batches import count_rows, rows_at, slices, to_device

Point = namedtuple("Point", ["x", "y"])


def rows(n, *shape):
    return torch.arange(n * max(1, int(torch.tensor(shape).prod()))).reshape(n, *shape).float()


@st.composite
def batches(draw, n):
    """A nesting of leaves of n rows and of constants; at least one leaf has rows."""
    leaf = st.sampled_from([rows(n), rows(n, 2), rows(n, 2, 3), [f"r{i}" for i in range(n)], list(range(n))])
    constant = st.sampled_from([torch.tensor(3.0), "name", 7, 1.5, None, True, b"x", 1j])
    wrap = lambda inner: st.one_of(  # noqa: E731
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
    )
    return draw(leaf), draw(st.recursive(st.one_of(leaf, constant), wrap, max_leaves=8))


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


def test_a_batch_that_fits_is_handed_out_as_it_is():
    batch = {"x": rows(3)}
    assert next(iter(slices(batch, 3, 3)))[0] is batch
    assert next(iter(slices(batch, 3, 5)))[0] is batch


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_slices_are_views(micro_batch):
    x = rows(6, 2)
    storage = x.untyped_storage().data_ptr()
    assert all(piece.untyped_storage().data_ptr() == storage for piece, _ in slices(x, 6, micro_batch))


@pytest.mark.parametrize(
    "batch",
    [
        {"x": rows(4), "names": list("abcd")},
        OrderedDict(x=rows(4)),
        UserDict(x=rows(4)),
        types.MappingProxyType({"x": rows(4)}),
        Point(rows(4), rows(4, 2)),
        [rows(4), rows(4, 3)],
        (rows(4), (rows(4), {"deep": [rows(4)]})),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_the_kind_of_container_is_kept(batch):
    pieces = [piece for piece, _ in slices(batch, count_rows(batch), 3)]
    assert [type(piece) for piece in pieces] == [type(batch)] * 2
    assert [count_rows(piece) for piece in pieces] == [3, 1]


def test_lists_of_constants_have_a_row_an_item_and_tuples_of_them_none():
    batch = {"x": rows(2), "names": ["a", "b"], "size": (224, 224, 3), "scale": torch.tensor(0.5)}
    pieces = [piece for piece, _ in slices(batch, count_rows(batch), 1)]
    assert [piece["names"] for piece in pieces] == [["a"], ["b"]]
    assert all(piece["size"] == (224, 224, 3) for piece in pieces)
    assert all(piece["scale"] is batch["scale"] for piece in pieces)


class Custom:
    x = rows(3)


REFUSED = {
    "a custom object": (Custom(), "batch", "Custom"),
    "a custom object inside": ({"a": (rows(2), Custom())}, r"batch['a'][1]", "Custom"),
    "an array": ((rows(2), numpy.zeros(2)), "batch[1]", "ndarray"),
    "a generator": ((x for x in range(3)), "batch", "generator"),
    "a set": ({1, 2}, "batch", "set"),
    "rows that differ": ((rows(3), rows(4)), "batch", "batch[0]: 3, batch[1]: 4"),
    "names that differ": ({"x": rows(3), "n": ["a"]}, "batch", "batch['n']: 1"),
    "only constants": ({"a": 3, "b": torch.tensor(1.0)}, "batch", "dict without rows"),
    "nothing": ({}, "batch", "dict without rows"),
    "None": (None, "batch", "NoneType without rows"),
    "no rows": (rows(0), "batch", "0 rows"),
    "an empty list": ([], "batch", "0 rows"),
}


@pytest.mark.parametrize(("batch", "field", "given"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_certain_rows_is_refused_by_its_path(batch, field, given):
    with pytest.raises(BatchError) as caught:
        count_rows(batch)
    assert caught.value.field == field
    assert given in caught.value.given
    assert caught.value.expected


def test_moving_to_the_device_a_batch_is_on_returns_the_batch():
    batch = {"x": rows(3), "name": "all"}
    assert to_device(batch, torch.device("cpu")) is batch


def test_moving_takes_the_tensors_along_and_nothing_else():
    batch = {"x": rows(3), "names": ["a", "b", "c"], "pair": Point(rows(3), None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].device.type == moved["pair"].x.device.type == "meta"
    assert (moved["names"], moved["pair"].y) == (["a", "b", "c"], None)
    assert batch["x"].device.type == "cpu"


def test_rows_are_taken_by_index_and_lie_as_those_of_the_batch():
    whole = rows(4, 5)
    batch = {"view": whole[:, :-1], "turned": rows(3, 4).T, "same": whole[:1].expand(4, 5)}
    batch |= {"names": ["a", "b", "c", "d"], "k": 3}
    found = rows_at(batch, [0, 0, 3, 1])
    assert torch.equal(found["view"], whole[[0, 0, 3, 1], :-1])
    assert torch.equal(found["turned"], batch["turned"][[0, 0, 3, 1]])
    assert (found["names"], found["k"]) == (["a", "a", "d", "b"], 3)
    assert torch.equal(found["same"], batch["same"])
    for name in ("view", "turned"):
        assert found[name].stride() == batch[name].stride()
