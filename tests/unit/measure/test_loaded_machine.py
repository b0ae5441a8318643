"""Timing beside other processes: by processor time, on the threads that are free, and only then."""

from __future__ import annotations

import os
import time

import pytest
import torch

from trimtab.measure import timing

CPU = torch.device("cpu")


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def share_of(monkeypatch, share):
    monkeypatch.setattr(timing, "processor_fraction", lambda num_threads: share)


def asleep():
    time.sleep(0.05)


@pytest.mark.parametrize(("share", "threads"), [(0.79, 3), (0.5, 2), (0.1, 1)])
def test_a_loaded_machine_is_timed_by_processor_time_on_the_free_threads(monkeypatch, four_threads, share, threads):
    share_of(monkeypatch, share)
    with timing.loaded_machine_clock(CPU) as found:
        assert (found, torch.get_num_threads()) == (share, threads)
        assert timing.time_call(asleep, CPU) < 0.01
        assert timing.time_call(lambda: sum(range(500_000)), CPU) > 0.0
    assert torch.get_num_threads() == 4
    assert timing.time_call(asleep, CPU) >= 0.05


@pytest.mark.parametrize(("share", "device"), [(1.0, CPU), (0.2, torch.device("cuda"))])
def test_an_idle_machine_and_another_device_keep_the_wall_clock(monkeypatch, four_threads, share, device):
    share_of(monkeypatch, share)
    with timing.loaded_machine_clock(device) as found:
        assert (found, torch.get_num_threads()) == (None, 4)
        assert timing.time_call(asleep, CPU) >= 0.05


def test_the_clock_and_the_threads_come_back_after_an_error(monkeypatch, four_threads):
    share_of(monkeypatch, 0.5)
    with pytest.raises(RuntimeError), timing.loaded_machine_clock(CPU):
        raise RuntimeError
    assert torch.get_num_threads() == 4
    assert timing.time_call(asleep, CPU) >= 0.05


def test_within_a_loaded_clock_the_load_is_not_measured_again(monkeypatch, four_threads):
    share_of(monkeypatch, 0.5)
    with timing.loaded_machine_clock(CPU), timing.loaded_machine_clock(CPU) as inner:
        assert (inner, torch.get_num_threads()) == (None, 2)


def test_more_threads_than_processors_are_read_as_load():
    """Of the private function, because a fixture of all tests replaces the public one."""
    threads = 8 * (os.cpu_count() or 1)
    assert 0.0 < timing._probed_fraction(threads) < timing.LOADED
