"""The allocator's mode is set by what the C library takes: an older glibc refuses a high mmap threshold."""

from __future__ import annotations

import pytest
import torch
from raising import raises

import trimtab
from trimtab.core.errors import ValueGivenError
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
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(4, allocator="retain"))
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
