"""Example batches that can be read once are refused before anything is read from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.errors import BatchError

MAKE = {
    "generator": lambda: (torch.randn(4, 8) for _ in range(2)),
    "zip": lambda: zip(torch.randn(2, 4, 8), torch.randn(2, 4, 8), strict=True),
    "in a dict": lambda: {"x": torch.randn(4, 8), "parts": iter([1, 2])},
    "in a tuple": lambda: (torch.randn(4, 8), map(int, [1, 2])),
}


@pytest.mark.parametrize("name", MAKE)
def test_an_iterator_is_refused_and_not_read(name):
    model, batch = nn.Linear(8, 3), MAKE[name]()
    with pytest.raises(BatchError) as caught:
        trimtab.plan(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean(), batch
        )
    assert caught.value.code == "batch.iterator"
    read = batch["parts"] if name == "in a dict" else batch[1] if name == "in a tuple" else batch
    assert len(list(read)) == 2
