"""Rows are counted, sliced and moved in any nesting, and refused where that would be a guess."""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import trimtab
from trimtab.core.errors import BatchError
from trimtab.plans.plan import Plan
from trimtab.training.batch import BY_CONTAINERS, samples_at, to_device

Point = namedtuple("Point", ["x", "y"])
slices = BY_CONTAINERS.slices


def count_rows(batch):
    return BY_CONTAINERS.read(batch).samples


def is_splittable(batch):
    return BY_CONTAINERS.read(batch).is_splittable


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

    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(8, micro_batch=4)) as run:
        run.train_step(run.window((rows(8, 2), items)), loss_fn)
    assert seen == items


NO_ITEMS_OF_ROWS = {"fewer dicts": [{"size": 224}] * 3, "more of them": [{"size": 224}] * 9}


@pytest.mark.parametrize("items", NO_ITEMS_OF_ROWS.values(), ids=NO_ITEMS_OF_ROWS)
def test_dicts_of_another_number_are_not_split(items):
    batch = {"x": rows(8, 2), "items": items}
    assert (count_rows(batch), is_splittable(batch)) == (8, False)
    assert next(slices(batch, 8, 8))[0] is batch
    for split in (lambda: list(slices(batch, 8, 4)), lambda: samples_at(batch, list(range(8)))):
        with pytest.raises(BatchError) as caught:
            split()
        assert caught.value.code == "batch.not_splittable"
        assert "split=" in caught.value.hint


WHOLE = {
    "a tuple": [(224, 224)],
    "a tensor without dimensions": [torch.tensor(0.5)],
    "more of them": [("a", 1)] * 9,
}


@pytest.mark.parametrize("items", WHOLE.values(), ids=WHOLE)
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
    assert (count_rows(batch), is_splittable(batch)) == (2, False)


@pytest.mark.parametrize("micro_batch", [8, 4])
def test_a_run_trains_such_a_batch_whole_with_a_warning_if_the_plan_splits(micro_batch):
    model, batch = torch.nn.Linear(2, 1), (rows(8, 2), [{"size": 224}])
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(8, micro_batch)) as run:
        for repeat in range(2):
            is_told = micro_batch == 4 and not repeat
            with pytest.warns(RuntimeWarning, match="count=") if is_told else contextlib.nullcontext():
                window = run.window(batch)
            assert (len(window), window.samples) == (1, 8)
            run.train_step(window, lambda model, part: model(part[0]).mean() * part[1][0]["size"])
        assert run.applied_steps == 2


@pytest.mark.parametrize(
    "batch",
    [
        {"x": rows(3), "grid": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]},
        {"x": rows(4), "columns": [rows(4)] * 4},
        {"x": rows(4), "columns": [{"deep": rows(4)}] * 4},
    ],
)
def test_as_many_lists_of_as_many_items_as_rows_could_be_read_either_way_and_are_not_split(batch):
    number = count_rows(batch)
    assert number == len(batch["x"])
    assert next(slices(batch, number, number))[0] is batch
    with pytest.raises(BatchError) as caught:
        list(slices(batch, number, 2))
    assert caught.value.code == "batch.not_splittable"


COLUMNS = {
    "tensors": [rows(4), rows(4, 3)],
    "lists": [list("abcd"), list(range(4))],
    "in dicts": [{"deep": rows(4)}] * 3,
    "beside a number": [rows(4), 3.0, (1, 2), torch.tensor(0.5)],
}


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_a_list_of_columns_is_cut_column_by_column(columns):
    pieces = [piece for piece, _ in slices({"x": rows(4), "columns": columns}, 4, 3)]
    assert [len(piece["columns"]) for piece in pieces] == [len(columns)] * 2
    assert [count_rows(piece) for piece in pieces] == [3, 1]


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
    found = samples_at(batch, [0, 0, 3, 1])
    assert torch.equal(found["view"], whole[[0, 0, 3, 1], :-1])
    assert torch.equal(found["turned"], batch["turned"][[0, 0, 3, 1]])
    assert (found["names"], found["k"]) == (["a", "a", "d", "b"], 3)
    assert torch.equal(found["same"], batch["same"])
    for name in ("view", "turned"):
        assert found[name].stride() == batch[name].stride()
