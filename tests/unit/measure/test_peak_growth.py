"""Bytes that a call held at most: garbage of before that is freed meanwhile is not its own, and its own is freed."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from trimtab.state import peak_memory
from trimtab.state.peak_memory import peak_growth

MIB = 2**20


@pytest.fixture(params=["frozen by nobody", "frozen by somebody"])
def frozen(request):
    """How many objects somebody else has left out of collections."""
    before = gc.get_threshold()
    gc.collect()
    gc.unfreeze()
    if request.param == "frozen by somebody":
        gc.freeze()
    yield gc.get_freeze_count()
    gc.set_threshold(*before)
    gc.freeze()


def held(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def in_a_cycle(tensor: torch.Tensor) -> list:
    cycle = [tensor]
    cycle.append(cycle)
    return cycle


def counted_beside_garbage() -> int:
    """Return what a call of 5 MiB is counted to hold, in which garbage of an earlier count would be collected."""
    garbage = []
    peak_growth(lambda: garbage.append(in_a_cycle(held(8))))
    garbage.clear()

    def step():
        first = held(2)
        gc.set_threshold(1, 1, 1)
        for _ in range(100):
            in_a_cycle(first)
        return first + held(1)[0]

    return peak_growth(step)


def test_older_garbage_is_not_collected_amid_a_count(frozen):
    assert counted_beside_garbage() == pytest.approx(5 * MIB, abs=MIB // 10)
    assert gc.get_freeze_count() == pytest.approx(frozen, abs=0.01 * frozen)


def test_which_would_be_counted_wrong(frozen, monkeypatch):
    monkeypatch.setattr(peak_memory, "_older_garbage_kept", contextlib.nullcontext)
    assert counted_beside_garbage() < 5 * MIB


def test_garbage_that_a_call_makes_is_freed_as_it_is_in_training(frozen):
    def step():
        gc.set_threshold(1, 1, 1)
        for _ in range(20):
            in_a_cycle(held(4))

    assert peak_growth(step) <= 12 * MIB


def test_what_fails_leaves_collections_as_they_were(frozen):
    def step():
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        peak_growth(step)
    assert gc.get_freeze_count() == pytest.approx(frozen, abs=0.01 * frozen)
