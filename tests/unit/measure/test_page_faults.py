"""Page faults are counted, and one has a price."""

from __future__ import annotations

import mmap

import pytest
import torch

from trimtab.measure import page_faults
from trimtab.measure.page_faults import fault_s, num_faults, time_settled

BYTES = 16 * 2**20


def test_fresh_memory_faults_and_used_memory_does_not():
    before = num_faults()
    if before is None:
        pytest.skip("nobody counts page faults here")
    with mmap.mmap(-1, BYTES) as fresh:
        for offset in range(0, BYTES, mmap.PAGESIZE):
            fresh[offset] = 1
        first = num_faults() - before
        for offset in range(0, BYTES, mmap.PAGESIZE):
            fresh[offset] = 2
        second = num_faults() - before - first
    assert first >= BYTES // (2 * 2**20)  # at the least one a huge page
    assert second < first / 2


def test_a_fault_has_a_price():
    price = fault_s()
    if price is None:
        pytest.skip("nobody counts page faults here")
    assert 0 < price < 0.01
    assert fault_s() == price  # measured once


@pytest.mark.parametrize(
    ("probes", "price"),
    [
        ([2e-6, -9e-6, 3e-6, 2e-6, 2e-6], 2e-6),  # a second fill that was held up
        ([-1e-6] * 5, None),  # no price at all is not a price of nothing
        ([None] * 5, None),
        ([None, 2e-6, None, 4e-6, 3e-6], 3e-6),
    ],
)
def test_the_price_is_a_median_and_above_zero(monkeypatch, probes, price):
    found = iter(probes)
    monkeypatch.setattr(page_faults, "_probe", lambda: next(found))
    assert fault_s.__wrapped__() == price


def test_without_counts_or_memory_there_is_no_price(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(page_faults, "resource", None)
        assert num_faults() is None
        assert fault_s.__wrapped__() is None

    def fails():
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(page_faults, "_probe", fails)
    assert fault_s.__wrapped__() is None


@pytest.mark.parametrize(
    ("faults", "counts"),
    [([0, 10], 1), ([0, 5000, 5000, 5003], 2), ([0, 900, 900, 1800, 1800, 2700], 3), ([None, None], 1)],
)
def test_a_call_that_asked_for_memory_is_timed_again(monkeypatch, faults, counts):
    calls, found = [], iter(faults)
    monkeypatch.setattr(page_faults, "num_faults", lambda: next(found))
    monkeypatch.setattr(page_faults, "time_call", lambda function, device: function() or float(len(calls)))
    assert time_settled(lambda: calls.append(1), torch.device("cpu")) == counts
    assert len(calls) == counts
    assert next(found, None) is None
