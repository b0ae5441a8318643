"""Devices that Zeus reads, as meters: what they count, and what is said where they cannot be read."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from raising import raises

from trimtab.core.energy_reading import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.energy.energy_meter import EnergyClock, Meter, MeterLost
from trimtab.energy.meter_selection import Metering, find_meter
from trimtab.energy.zeus import ZeusApple, ZeusGpu

TOTAL = "get_total_energy_consumption"


class Gone(Exception):
    """As a GPU's that has fallen off the bus."""


@dataclass
class Chip:
    """As Zeus tells an Apple chip, in mJ; a part that there is none of is None."""

    cpu_total_mj: int | None = None
    performance_cores_mj: list[int] | None = None
    dram_mj: int | None = None
    gpu_mj: int | None = None
    ane_mj: int | None = None


def library(asked, *, name=TOTAL, of="get_gpus"):
    return SimpleNamespace(**{of: lambda: SimpleNamespace(**{name: asked})})


def test_a_gpus_counter_is_joules_of_that_gpu():
    counters = {0: 9_000, 2: 5_500}
    meter = ZeusGpu(2, library=library(counters.__getitem__))
    assert isinstance(meter, Meter)
    assert (meter.joules(), meter.provenance, meter.period_s) == (5.5, Provenance.MEASURED, math.inf)
    counters[2] += 1_250
    assert meter.joules() == 6.75
    assert meter.sources == ("zeus gpu 2",)


def test_an_apple_chips_parts_are_counted_once():
    chip = Chip(cpu_total_mj=4_000, performance_cores_mj=[3_000, 1_000], dram_mj=500, gpu_mj=2_000, ane_mj=None)
    assert ZeusApple(library=library(lambda: chip, of="get_soc")).joules() == 6.5


def test_it_is_read_as_any_other_meter_of_the_users():
    counted = [0]
    meter = ZeusGpu(library=library(lambda index: counted[0]))
    found = find_meter(torch.device("cpu"), Metering(meter=meter))
    assert (found.facts.provenance, found.facts.sources) == (Provenance.MEASURED, ("zeus gpu 0",))
    assert found.facts.uncounted == ("the CPU, and other GPUs",)  # They take part in the computation.
    assert found.facts.uncounted[0] in found.facts.describe()
    now = [0.0]
    clock = EnergyClock(found.meter, clock=lambda: now[0])
    clock.start()
    now[0], counted[0] = 2.0, 300_000
    found = clock.read()
    assert (found.joules, found.seconds) == (300.0, 2.0)


def test_a_device_that_is_lost_later_has_no_joules():
    is_gone = [False]

    def asked(index):
        if is_gone[0]:
            raise Gone("fell off the bus")
        return 1_000

    meter = ZeusGpu(library=library(asked))
    is_gone[0] = True
    with pytest.raises(MeterLost, match="Gone: fell off the bus"):
        meter.joules()


def fails(*given):
    raise Gone("NVML and AMDSMI unavailable")


@pytest.mark.parametrize(
    ("make", "code", "named"),
    [
        (lambda: ZeusGpu(library=SimpleNamespace(get_gpus=fails)), "zeus.no_device", "AMDSMI unavailable"),
        (lambda: ZeusGpu(library=library(fails)), "zeus.not_readable", "AMDSMI unavailable"),
        (lambda: ZeusGpu(library=library(fails, name="energy")), "zeus.not_readable", "AttributeError"),
        (lambda: ZeusApple(library=library(Chip, of="get_soc")), "zeus.not_readable", "no known energy counter"),
        (lambda: ZeusGpu(-1, library=library(fails)), "value.invalid", "-1"),
    ],
)
def test_what_cannot_be_read_is_refused_at_the_door_and_is_never_nothing(make, code, named):
    with raises(ValueGivenError, code=code) as caught:
        make()
    assert named in str(caught.value)


def test_without_zeus_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    with raises(ValueGivenError, code="zeus.not_installed", field="meter"):
        ZeusGpu()
