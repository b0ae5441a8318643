"""Memory of the process: allocator modes of the C library, and page faults, which are counted and have a price."""

from __future__ import annotations

import mmap
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from raising import raises
from small_loops import sgd

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.measure import timing
from trimtab.measure.timing import fault_s, num_faults, time_settled
from trimtab.plans.plan import Plan
from trimtab.state import process_state

TRIM, THRESHOLD, MAX = -1, -3, -4
MIB = 2**20


class Libc:
    """A C library whose `mallopt` refuses what it is told to refuse, and holds the rest."""

    def __init__(self, refuses=lambda parameter, value: False):
        self.refuses, self.held = refuses, {}

    def mallopt(self, parameter, value):
        if self.refuses(parameter, value):
            return 0
        self.held[parameter] = value
        return 1


def high_threshold(parameter, value):
    return parameter == THRESHOLD and value > 32 * MIB


def any_mapping(parameter, value):
    return high_threshold(parameter, value) or parameter == MAX


@pytest.fixture
def use(monkeypatch):
    """Return what puts a C library in place, with the mode not yet set and nothing yet tried."""
    for name in ("GLIBC_TUNABLES", *process_state._OWN_SETTINGS):
        monkeypatch.delenv(name, raising=False)

    def put(libc):
        monkeypatch.setattr(process_state, "_libc", lambda: libc)
        monkeypatch.setattr(process_state, "_mode", "keep")
        monkeypatch.setattr(process_state, "_way", None)
        return libc

    return put


def test_nothing_is_set_before_it_is_asked_for(use):
    libc = use(Libc())
    assert process_state.can_retain()
    process_state.set_allocator_mode("keep")
    assert libc.held == {}


def test_a_library_that_takes_the_threshold_gets_it(use):
    libc = use(Libc())
    process_state.set_allocator_mode("retain")
    assert libc.held == {THRESHOLD: 2**30, TRIM: 2**31 - 1}
    process_state.set_allocator_mode("keep")
    assert libc.held == {THRESHOLD: 32 * MIB, TRIM: 64 * MIB}


def test_one_that_refuses_it_maps_no_block_instead(use):
    libc = use(Libc(high_threshold))
    process_state.set_allocator_mode("retain")
    assert (libc.held[MAX], libc.held[TRIM]) == (0, 2**31 - 1)
    assert process_state.allocator_mode() == "retain"
    process_state.set_allocator_mode("keep")
    assert libc.held == {THRESHOLD: 32 * MIB, TRIM: 64 * MIB, MAX: 65536}


@pytest.mark.parametrize("libc", [Libc(any_mapping), Libc(lambda *_: True), None], ids=["mapping", "all", "no glibc"])
def test_one_that_refuses_both_cannot_retain(use, libc):
    use(libc)
    with raises(ValueGivenError, code="allocator.unsupported", field="allocator"):
        process_state.set_allocator_mode("retain")
    assert process_state.allocator_mode() == "keep"
    if libc is not None:
        assert libc.held.get(TRIM) in (None, 64 * MIB)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueGivenError) as caught:
        trimtab.start(model, sgd(model), Plan.fixed(4, allocator="retain"))
    assert caught.value.field.endswith("allocator")


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")]
)
def test_what_the_user_set_is_left_alone(use, monkeypatch, name, value):
    libc = use(Libc())
    monkeypatch.setenv(name, value)
    assert not process_state.can_retain()
    with raises(ValueGivenError, code="allocator.unsupported", field="allocator"):
        process_state.set_allocator_mode("retain")
    assert libc.held == {}


def faults_by_turns() -> list[tuple[float, float]]:
    """Return page faults in mode "keep" and in the second allocation in mode "retain", in pages of the allocation."""
    size = 48 * 2**18  # 48 MiB, more than glibc's largest threshold for mapping a block

    def faults() -> float:
        before = num_faults()
        blocks = [torch.ones(size) for _ in range(3)]
        del blocks
        return (num_faults() - before) / (3 * size * 4 // resource.getpagesize())

    found = []
    with process_state.separate_heaps():
        for _ in range(3):
            kept = faults()
            process_state.set_allocator_mode("retain")
            faults()
            found.append((kept, faults()))
            process_state.set_allocator_mode("keep")
    return found


@pytest.mark.skipif(not process_state.can_retain(), reason="needs glibc")
def test_a_loop_that_returns_memory_is_not_served_from_the_memory_of_one_that_retains_it():
    """In a process of its own, whose heap holds nothing of other tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(faults_by_turns).result()
    assert all(kept >= 1 and retained < 1 for kept, retained in found), found


@pytest.mark.skipif(not process_state.can_retain(), reason="needs glibc")
def test_at_most_a_quarter_of_the_memory_is_held_back_and_nothing_after_the_context(monkeypatch):
    pages = {"SC_PHYS_PAGES": 2 * 4 * 40 * MIB, "SC_PAGE_SIZE": 1}  # A quarter is less than three blocks.
    monkeypatch.setattr(process_state.os, "sysconf", pages.__getitem__)
    with process_state.separate_heaps():
        process_state.set_allocator_mode("retain")
        try:
            blocks = [torch.ones(48 * 2**18) for _ in range(6)]
            del blocks
        finally:
            process_state.set_allocator_mode("keep")
        assert 1 <= len(process_state._parked) <= 3
    assert process_state._parked is None


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


def test_a_fault_has_a_price_if_faults_are_counted(monkeypatch):
    price = fault_s()
    if price is None:
        pytest.skip("nobody counts page faults here")
    assert 0 < price < 0.01
    assert fault_s() == price  # measured once
    with monkeypatch.context() as patch:
        patch.setattr(timing, "resource", None)
        assert num_faults() is None
        assert fault_s.__wrapped__() is None

    def fails():
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(timing, "_probe", fails)
    assert fault_s.__wrapped__() is None


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
    monkeypatch.setattr(timing, "_probe", lambda: next(found))
    assert fault_s.__wrapped__() == price


@pytest.mark.parametrize(
    ("faults", "counts"),
    [([0, 10], 1), ([0, 5000, 5000, 5003], 2), ([0, 900, 900, 1800, 1800, 2700], 3), ([None, None], 1)],
)
def test_a_call_that_asked_for_memory_is_timed_again(monkeypatch, faults, counts):
    calls, found = [], iter(faults)
    monkeypatch.setattr(timing, "num_faults", lambda: next(found))
    monkeypatch.setattr(timing, "time_call", lambda function, device: function() or float(len(calls)))
    assert time_settled(lambda: calls.append(1), torch.device("cpu")) == counts
    assert len(calls) == counts
    assert next(found, None) is None
