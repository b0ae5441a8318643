"""Batches of any nesting train alike: dicts, tuples, mappings, dataclasses, and what belongs to every row."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from plain_loop import assert_same_training, train_ours, train_plain
from torch import nn
from training_cases import ROWS, class_case

from trimtab.plans.plan import Plan
from trimtab.training.batch import BY_CONTAINERS

Pair = namedtuple("Pair", ["inputs", "labels"])


@dataclass(frozen=True, slots=True)
class Example:
    """Rows as fields, one of which no constructor takes."""

    inputs: Any
    labels: Any
    source: str = "a file"
    weight: float = field(default=1.0, init=False)

    def __getitem__(self, index):
        return (self.inputs, self.labels)[index]


NAMES = [f"row {i}" for i in range(ROWS)]


def nested(x, y):
    return {"inputs": {"x": x, "name": "all"}, "labels": (y, torch.tensor(3.0)), "names": NAMES, "count": 7}


def by_default(x, y):
    made = defaultdict(list)
    made.update(inputs=x, labels=y)
    return made


def pick(batch, key, index):
    return batch[key] if hasattr(batch, "keys") else batch[index]


STRUCTURES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"inputs": x, "labels": y},
    "named tuple": Pair,
    "ordered dict": lambda x, y: OrderedDict(inputs=x, labels=y),
    "user dict": lambda x, y: UserDict(inputs=x, labels=y),
    "default dict": by_default,
    "dataclass": Example,
    "mapping proxy": lambda x, y: types.MappingProxyType({"inputs": x, "labels": y}),
}


def structured_mean(model, batch):
    return nn.functional.cross_entropy(model(pick(batch, "inputs", 0)), pick(batch, "labels", 1))


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("micro_batch", [12, 5])
def test_every_structure_trains_as_in_the_plain_loop(micro_batch, structure):
    case = class_case(loss_fn=structured_mean)
    case = case.having(batches=[structure(*batch) for batch in case.batches])
    kinds = []

    def noting(model, batch):
        kinds.append(type(batch))
        return structured_mean(model, batch)

    ours = train_ours(case.having(loss_fn=noting), Plan.fixed(ROWS, micro_batch))
    assert_same_training(ours, train_plain(case), 1e-12)
    if structure is not STRUCTURES["default dict"]:  # its constructor takes something else: a dict it is
        assert set(kinds) == {type(case.batches[0])}


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_lists_of_strings_follow_their_rows_and_constants_go_to_each(micro_batch):
    seen = []

    def loss_fn(model, batch):
        x, (y, factor) = batch["inputs"]["x"], batch["labels"]
        assert (batch["inputs"]["name"], batch["count"], float(factor)) == ("all", 7, 3.0)
        assert len(batch["names"]) == len(x) == len(y)
        seen.extend(batch["names"])
        return factor * nn.functional.cross_entropy(model(x), y)

    case = class_case(loss_fn=loss_fn)
    case = case.having(batches=[nested(*batch) for batch in case.batches])
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch))
    assert seen == NAMES * len(case.batches)
    assert_same_training(ours, train_plain(case), 1e-12)


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_lists_of_a_dict_per_row_follow_their_rows(micro_batch):
    def loss_fn(model, batch):
        weights = torch.tensor([each["weight"] for each in batch["about"]], dtype=torch.float64)
        losses = nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="none")
        return (weights * losses).mean()

    about = [{"weight": 0.5 + i / ROWS, "source": NAMES[i]} for i in range(ROWS)]
    case = class_case(loss_fn=loss_fn)
    case = case.having(batches=[{"inputs": x, "labels": y, "about": about} for x, y in case.batches])
    assert_same_training(train_ours(case, Plan.fixed(ROWS, micro_batch)), train_plain(case), 1e-12)


def test_a_dataclass_may_have_a_field_without_a_value():
    @dataclass
    class Late:
        rows: torch.Tensor
        cache: object = field(init=False)

    pieces = [piece for piece, _ in BY_CONTAINERS.slices(Late(torch.arange(4.0)), 4, 2)]
    assert [piece.rows.tolist() for piece in pieces] == [[0, 1], [2, 3]]
    assert not hasattr(pieces[0], "cache")


def test_a_dataclass_keeps_what_is_not_per_row():
    seen = []

    def loss_fn(model, batch):
        seen.append((batch.source, batch.weight, len(batch.inputs)))
        return structured_mean(model, batch)

    case = class_case(loss_fn=loss_fn)
    batch = Example(*case.batches[0])
    object.__setattr__(batch, "weight", 2.0)
    train_ours(case.having(batches=[batch]), Plan.fixed(ROWS, 5))
    assert seen == [("a file", 2.0, 5), ("a file", 2.0, 5), ("a file", 2.0, 2)]
    assert len(batch.inputs) == ROWS


def test_a_single_tensor_is_a_batch():
    case = class_case(loss_fn=lambda model, x: model(x).square().mean())
    case = case.having(batches=[x for x, _ in case.batches])
    assert_same_training(train_ours(case, Plan.fixed(ROWS, 5)), train_plain(case), 1e-12)


def test_micro_batches_are_views_and_the_users_batch_is_not_changed():
    case = class_case()
    copies = [(x.clone(), y.clone()) for x, y in case.batches]
    addresses = []

    def loss_fn(model, batch):
        addresses.append(batch[0].untyped_storage().data_ptr())
        return structured_mean(model, batch)

    train_ours(case.having(loss_fn=loss_fn), Plan.fixed(ROWS, 5))
    assert set(addresses) == {x.untyped_storage().data_ptr() for x, _ in case.batches}
    for (x, y), (x0, y0) in zip(case.batches, copies, strict=True):
        assert torch.equal(x, x0)
        assert torch.equal(y, y0)
