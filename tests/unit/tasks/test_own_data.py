"""Datasets as a task's data: what they hold, in their order, and what is said where they hold no tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trimtab.core.errors import ValueGivenError
from trimtab.tasks import of_datasets


class Items(Dataset):
    def __init__(self, *items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


class ByChance(Items):
    def __getitem__(self, index):
        return torch.rand(2)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


class Counted(Endless):
    def __len__(self):
        return 3


def test_rows_are_those_of_the_datasets_in_their_order():
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    found = of_datasets(TensorDataset(x, y), TensorDataset(x[:5] + 100, y[:5]), name="mine", judged_samples=2)
    assert torch.equal(found.columns[0], x)
    assert torch.equal(found.columns[1], y)
    assert [len(batch[0]) for batch in found.held_out] == [2, 2, 1]
    assert torch.equal(torch.cat([batch[0] for batch in found.held_out]), x[:5] + 100)
    assert (found.source.name, found.source.origin) == ("mine", "TensorDataset and TensorDataset")
    found = of_datasets(Items((torch.ones(2), 3), (torch.zeros(2), 4)), Items((torch.ones(2), 5)), name="mine")
    assert found.columns[1].tolist() == [3, 4]
    alone = of_datasets(Items(torch.ones(2), torch.zeros(2)), Items(torch.ones(2)), name="mine")
    assert [column.shape for column in alone.columns] == [(2, 2)]

    def digest(x):
        return of_datasets(TensorDataset(x), TensorDataset(x[:1]), name="mine").source.sha256

    x = torch.ones(3, 2)
    assert digest(x) == digest(x.clone()) != digest(2 * x)
    # As labels that are missing are marked.
    missing = torch.tensor([[float("nan"), 1.0], [2.0, float("nan")]])
    found = of_datasets(TensorDataset(missing), TensorDataset(missing), name="mine")
    torch.testing.assert_close(found.columns[0], missing, equal_nan=True)


INSTEAD = r"the dataset that a DataLoader draws from.*run\.windows\(loader\)"


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (Endless(), rf"train: got a Endless, which has no length.*{INSTEAD}"),
        (Counted(), rf"train: got a Counted, .*or no items by index.*{INSTEAD}"),
        (DataLoader(TensorDataset(torch.ones(4, 2))), rf"train: got a DataLoader, .*by index.*{INSTEAD}"),
        (iter([torch.ones(2)]), rf"train: got a list_iterator, which has no length.*{INSTEAD}"),
        (Items(), "a dataset of no items"),
        (Items(torch.ones(2), torch.ones(3)), "items that do not make tensors.*pad or crop"),
        (Items({"x": torch.ones(2)}), "items that are a dict"),
        (Items("a", "b"), "items that are a str"),
        (ByChance(1, 2), "differ when they are read again.*SampleDraws"),
    ],
    ids=("stream", "stream with a length", "loader", "iterator", "empty", "ragged", "mappings", "words", "by chance"),
)
def test_what_makes_no_tensors_is_refused_with_the_way_out(train, said):
    with pytest.raises(ValueGivenError, match=said):
        of_datasets(train, Items(torch.ones(2)), name="mine")
