"""Joules of a real GPU by its counter: more while it works than while it waits, and no more than such a GPU takes."""

from __future__ import annotations

import time

import pytest
import torch

from trimtab.core.energy_reading import Provenance
from trimtab.energy.energy_meter import WINDOW_S, EnergyClock
from trimtab.energy.meter_selection import SelectedMeter, find_meter, with_idle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MOST_W = 2_000.0  # of a GPU and its machine's processors


@pytest.fixture(scope="module")
def found() -> SelectedMeter:
    found = find_meter(torch.device("cuda", 0))
    if found.facts.is_absent:
        pytest.skip(f"no meter: {found.facts.describe()}")
    return with_idle(found)


def test_a_busy_gpu_takes_more_than_an_idle_one(found: SelectedMeter) -> None:
    matrix = torch.randn(4096, 4096, device="cuda:0")
    clock = EnergyClock(found.meter)
    clock.start()
    while clock.seconds < 3 * WINDOW_S:
        for _ in range(10):
            matrix @ matrix
        torch.cuda.synchronize()
        clock.tick()
    busy = clock.read()
    assert busy.provenance is Provenance.MEASURED
    assert found.facts.idle_w is not None
    assert 0 < found.facts.idle_w < busy.watts < MOST_W


def test_the_counter_never_falls(found: SelectedMeter) -> None:
    before = found.meter.joules()
    time.sleep(0.5)
    assert found.meter.joules() >= before
