"""Joules of ranks: one reduction, in which a rank that reads nothing adds nothing and one without a meter all doubt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trimtab.core.energy import Energy, MeterFacts, Provenance, absent
from trimtab.distributed.energy import RankMeter, Seat, meter_of_rank, reads_of
from trimtab.measure.energy import GivenWatts, NoMeter
from trimtab.measure.meters import Metering, Reads

OWN = Energy(2.0, 30.0, Provenance.MEASURED, ("rapl package-0",))
FACTS = MeterFacts(Provenance.MEASURED, ("rapl package-0",))
NOTHING = MeterFacts(Provenance.ABSENT, reason="another rank reads it")


def rank(*, is_reader: bool = True, job: MeterFacts = FACTS) -> RankMeter:
    return RankMeter(NoMeter("planted"), FACTS if is_reader else NOTHING, job, is_reader)


def reduced(parts: list[tuple[Energy, RankMeter]]) -> list[Energy]:
    """Return what each rank is told, by a sum over what all of them say."""
    said: list[float] = []
    for own, metered in parts:
        metered.of_all(own, lambda figure: said.append(figure) or 1.0)
    return [metered.of_all(own, lambda figure: math.fsum(said)) for own, metered in parts]


def test_ranks_of_one_machine_add_up_to_what_one_of_them_read():
    first, second = reduced([(OWN, rank()), (absent("another rank reads it", 2.0), rank(is_reader=False))])
    assert (first.joules, first.provenance, first.sources) == (30.0, Provenance.MEASURED, OWN.sources)
    assert (second.joules, second.provenance, second.sources) == (30.0, Provenance.MEASURED, OWN.sources)


def test_ranks_of_several_devices_add_theirs():
    assert [each.joules for each in reduced([(OWN, rank()), (OWN, rank())])] == [60.0, 60.0]


def test_a_rank_whose_meter_was_lost_makes_all_unknown():
    first, second = reduced([(OWN, rank()), (absent("the GPU is lost", 2.0), rank())])
    assert (first.joules, second.joules) == (None, None)
    assert (first.reason, second.reason) == ("a rank lost its meter", "the GPU is lost")


def test_estimates_stay_estimates_on_a_rank_that_read_nothing_too():
    job = MeterFacts(Provenance.ESTIMATED, ("15 W, as given",))
    own = Energy(2.0, 30.0, Provenance.ESTIMATED, job.sources)
    found = reduced([(own, rank(job=job)), (absent("others", 2.0), rank(is_reader=False, job=job))])
    assert [each.provenance for each in found] == [Provenance.ESTIMATED] * 2


@pytest.mark.parametrize("figure", [0.0, math.nan, math.inf])
def test_a_sum_that_is_none_is_absent(figure):
    assert rank().of_all(OWN, lambda own: figure).joules is None


def test_where_a_rank_has_no_meter_nobody_waits():
    found = rank(job=replace(NOTHING, reason="there is none")).of_all(OWN, lambda own: 1 / 0)
    assert (found.joules, found.reason) == (None, "there is none")


def test_watts_of_a_machine_are_counted_once_whatever_gpus_it_has():
    """Given watts, and a meter of one's own, are of the whole machine: each rank would else add them all."""
    seats = [Seat("here", 0, "GPU-a"), Seat("here", 1, "GPU-b"), Seat("there", 0, "GPU-c")]
    for metering in (Metering(watts=300), Metering(meter=GivenWatts(5))):
        found = [reads_of(seats, rank, metering) for rank in range(3)]
        assert found == [Reads(True, False), Reads(False, False), Reads(True, False)]


def test_one_process_reads_what_there_is():
    found = meter_of_rank(torch.device("cpu"), Metering(watts=100))
    assert found.is_reader
    assert found.own == found.job
    assert found.job.sources == ("100 W, as given",)
