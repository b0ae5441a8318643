"""Bytes that a call held at most: what garbage is freed meanwhile is not its own."""

from __future__ import annotations

import gc

import pytest
import torch

from trimtab.measure.memory import peak_growth

MIB = 2**20


@pytest.fixture
def collects_at_once():
    """Have Python look for garbage after each few objects, whatever was done before."""
    before = gc.get_threshold()
    gc.collect()
    yield lambda: gc.set_threshold(1, 1, 1)
    gc.set_threshold(*before)


def held(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def leave_garbage() -> None:
    """Leave a tensor in a cycle that nothing refers to."""
    cycle = [held(8)]
    cycle.append(cycle)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_not_collected_amid_a_count(collects_at_once, collects):
    def step():
        first = held(2)
        collects_at_once()
        cycles = [[] for _ in range(100)]
        for each in cycles:
            each.append(each)
        return first + held(1)[0]

    if not collects:
        gc.disable()
    try:
        leave_garbage()
        assert peak_growth(step) == pytest.approx(5 * MIB, abs=MIB // 10)
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_what_fails_leaves_collection_on():
    with pytest.raises(ValueError, match="of the step"):
        peak_growth(lambda: exec('raise ValueError("of the step")'))
    assert gc.isenabled()
