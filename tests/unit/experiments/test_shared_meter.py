"""Several readers of one meter: each counts the same joules, and each is told what was lost."""

from __future__ import annotations

import math

import pytest
import torch
from raising import raises

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.energy.energy_meter import GivenWatts, Meter, MeterLost
from trimtab.energy.meter_selection import Metering, find_meter
from trimtab.experiments.task_plans import readers_of


class Counter:
    """A meter that goes on by 10 J each time that it is read, and raises once what it is told to."""

    provenance, sources, period_s = Provenance.MEASURED, ("a counter",), 7.0

    def __init__(self) -> None:
        self.shows, self.fails = 0.0, None

    def joules(self) -> float:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.shows += 10.0
        return self.shows


class Partial(Counter):
    """One that says what it does not count."""

    uncounted = ("the fans",)


def test_a_reader_is_the_meter_that_it_reads():
    one, other = readers_of(Counter(), 2)
    assert isinstance(one, Meter)
    assert (one.provenance, one.sources, one.period_s) == (Provenance.MEASURED, ("a counter",), 7.0)
    assert (one.uncounted, readers_of(Partial(), 1)[0].uncounted) == ((), ("the fans",))
    assert [one.joules(), other.joules(), one.joules()] == [10.0, 20.0, 30.0]
    limit = PowerLimit("gpu 0", 700.0)

    class Limited(Counter):
        def limits(self):
            return (limit,)

    assert [reader.limits() for reader in readers_of(Limited(), 2)] == [(limit,)] * 2
    assert readers_of(GivenWatts(50), 1)[0].limits() == ()


@pytest.mark.parametrize("error", [MeterLost("it wrapped"), OSError("no such device")])
def test_all_of_them_are_told_once_what_one_of_them_lost(error):
    meter = Counter()
    one, other, third = readers_of(meter, 3)
    meter.fails = error
    with pytest.raises(type(error), match=str(error)):
        one.joules()
    assert one.joules() == 10.0  # it was told
    for late in (other, third):
        with pytest.raises(MeterLost, match=str(error)):
            late.joules()
        assert math.isfinite(late.joules())


def test_what_has_no_words_is_told_all_the_same():
    meter = Counter()
    one, other = readers_of(meter, 2)
    meter.fails = MeterLost()
    with pytest.raises(MeterLost):
        one.joules()
    with pytest.raises(MeterLost, match="could not be read"):
        other.joules()


def test_what_a_meter_does_not_count_is_named_in_a_tuple():
    assert find_meter(torch.device("cpu"), Metering(meter=Partial())).facts.uncounted == ("the fans",)
    spelt = Partial()
    spelt.uncounted = "the fans"  # whose letters would be named one by one
    with raises(ValueGivenError, code="meter.invalid", field="meter"):
        find_meter(torch.device("cpu"), Metering(meter=spelt))
