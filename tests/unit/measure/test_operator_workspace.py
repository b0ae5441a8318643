"""What an operator takes for itself: counted once for calls that are alike, where the process is alike too."""

from __future__ import annotations

import pytest
import torch

from trimtab.measure import storage_tracker
from trimtab.measure.storage_tracker import call_of, measure_calls


@pytest.fixture
def counts(monkeypatch):
    """Return how often something was counted."""
    counted = []

    def growth(function):
        counted.append(function())
        return 1_000_000

    monkeypatch.setattr(storage_tracker, "peak_growth", growth)
    storage_tracker._taken.cache_clear()
    yield counted
    storage_tracker._taken.cache_clear()  # what is in it by now was made up


def softmax(rows: int):
    return call_of(torch.ops.aten._softmax.default, (torch.randn(rows, 5), -1, False), {})


def test_calls_that_are_alike_are_measured_once_in_a_mode_of_the_process(counts):
    first = measure_calls([softmax(3), softmax(3)])
    assert measure_calls([softmax(3)]) == first
    assert len(counts) == 1
    measure_calls([softmax(4)])
    assert len(counts) == 2
    torch.use_deterministic_algorithms(True)
    try:
        measure_calls([softmax(3)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(counts) == 3
