"""The allocator's mode is set by what the C library takes: an older glibc refuses a high mmap threshold."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.measure import allocator

TRIM, THRESHOLD, MAX = -1, -3, -4
MIB = 2**20


class Libc:
    """A C library whose `mallopt` refuses what it is told to refuse, and holds the rest.

    It maps blocks from `threshold` up; what was asked of it is in `asked`.
    """

    def __init__(self, refuses=lambda parameter, value: False, threshold=20 * MIB):
        self.refuses, self.threshold = refuses, threshold
        self.held, self.asked, self.hblks = {}, [], 0

    def mallopt(self, parameter, value):
        if self.refuses(parameter, value):
            return 0
        self.held[parameter] = value
        return 1

    def malloc(self, size):
        self.asked.append(size)
        self.hblks += size + 64 >= self.threshold
        return size

    def free(self, block):
        self.hblks -= block + 64 >= self.threshold

    def mallinfo2(self):
        return SimpleNamespace(hblks=self.hblks)


def high_threshold(parameter, value):
    return parameter == THRESHOLD and value > 32 * MIB


def any_mapping(parameter, value):
    return high_threshold(parameter, value) or parameter == MAX


@pytest.fixture
def use(monkeypatch):
    """Return what puts a C library in place, with the mode not yet set and nothing yet tried."""
    for name in ("GLIBC_TUNABLES", *allocator._OWN_SETTINGS):
        monkeypatch.delenv(name, raising=False)

    def put(libc):
        monkeypatch.setattr(allocator, "_libc", lambda: libc)
        monkeypatch.setattr(allocator, "_mode", "keep")
        monkeypatch.setattr(allocator, "_way", None)
        return libc

    return put


def test_nothing_is_set_before_it_is_asked_for(use):
    libc = use(Libc())
    assert allocator.can_retain()
    allocator.set_mode("keep")
    assert (libc.held, libc.asked) == ({}, [])


def test_a_library_that_takes_the_threshold_gets_it(use):
    libc = use(Libc())
    allocator.set_mode("retain")
    assert libc.held == {THRESHOLD: 2**30, TRIM: 2**31 - 1}
    allocator.set_mode("keep")
    assert libc.held == {THRESHOLD: 20 * MIB, TRIM: 40 * MIB}  # where it stood


def test_one_that_refuses_it_maps_no_block_instead(use):
    libc = use(Libc(high_threshold))
    allocator.set_mode("retain")
    assert (libc.held[MAX], libc.held[TRIM]) == (0, 2**31 - 1)
    assert allocator.mode() == "retain"
    allocator.set_mode("keep")
    assert libc.held == {THRESHOLD: 20 * MIB, TRIM: 40 * MIB, MAX: 65536}


@pytest.mark.parametrize("libc", [Libc(any_mapping), Libc(lambda *_: True), None], ids=["mapping", "all", "no glibc"])
def test_one_that_refuses_both_cannot_retain(use, libc):
    use(libc)
    with pytest.raises(ValueGivenError, match="refuses it"):
        allocator.set_mode("retain")
    assert allocator.mode() == "keep"
    if libc is not None:
        assert libc.held.get(TRIM) in (None, 40 * MIB)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueGivenError, match=r"allocator: given retain"):
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(4, allocator="retain"))


def test_blocks_that_are_not_the_librarys_own_are_left_alone(use):
    """Another allocator answers (loaded before glibc's): what is set would be set for nobody."""
    libc = use(Libc(threshold=math.inf))
    with pytest.raises(ValueGivenError, match="refuses it"):
        allocator.set_mode("retain")
    assert libc.held == {}


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")]
)
def test_what_the_user_set_is_left_alone(use, monkeypatch, name, value):
    libc = use(Libc())
    monkeypatch.setenv(name, value)
    assert not allocator.can_retain()
    with pytest.raises(ValueGivenError, match="refuses it"):
        allocator.set_mode("retain")
    assert libc.held == {}


@pytest.mark.skipif(not allocator.can_retain(), reason="needs glibc")
def test_a_real_librarys_thresholds_are_found():
    """In a process of its own, where none was set yet: a block of 20 MiB, freed, is where they then stand."""
    script = (
        "import torch\nfrom trimtab.measure import allocator\n"
        "torch.empty(20 * 2**20, dtype=torch.uint8)\n"
        "print(*allocator._thresholds().values())\nprint(*allocator._thresholds().values())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        threshold, trim = map(int, line.split())
        assert 20 * MIB <= threshold <= 20.5 * MIB
        assert trim == 2 * threshold
