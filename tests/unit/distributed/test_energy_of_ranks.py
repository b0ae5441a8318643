"""Joules of ranks: each counter of a machine is read by one of them, and one reduction adds up what they read."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.core.energy_reading import OTHER_RANKS, Energy, MeterFacts, Provenance, absent_energy
from trimtab.distributed import rank_energy
from trimtab.distributed.process_group import JobPosition
from trimtab.distributed.rank_energy import MeterPlacement, RankMeter, meter_of_rank, reads_of
from trimtab.energy.energy_meter import GivenWatts, NoMeter
from trimtab.energy.meter_selection import Metering, ReadCounters, SelectedMeter

OWN = Energy(2.0, 30.0, Provenance.MEASURED, ("rapl package-0",))
MEASURED = MeterFacts(Provenance.MEASURED, ("rapl package-0",), 10.0)
ESTIMATED = MeterFacts(Provenance.ESTIMATED, ("15 W, as given",))
OTHERS = NoMeter("another rank reads it")
ON_TWO_GPUS = [MeterPlacement("here", 0, "GPU-a"), MeterPlacement("here", 1, "GPU-b")]


def reduced(parts: list[tuple[Energy, bool]], job: MeterFacts = MEASURED) -> list[Energy]:
    """Return what each rank is told, by a sum over what all of them say."""
    ranks = [(RankMeter(OTHERS, job, job, is_reader), own) for own, is_reader in parts]
    said: list[float] = []
    for rank, own in ranks:
        rank.of_all(own, lambda figure: said.append(figure) or 1.0)
    return [rank.of_all(own, lambda figure: math.fsum(said)) for rank, own in ranks]


def test_readings_of_ranks_add_up():
    first, second = reduced([(OWN, True), (absent_energy("another rank reads it", 2.0), False)])
    assert (first.joules, first.provenance, first.sources) == (30.0, Provenance.MEASURED, OWN.sources)
    assert second == first
    assert [each.joules for each in reduced([(OWN, True), (OWN, True)])] == [60.0, 60.0]
    first, second = reduced([(OWN, True), (absent_energy("the GPU is lost", 2.0), True)])
    assert (first.joules, second.joules) == (None, None)
    assert (first.reason, second.reason) == ("another rank's energy meter failed", "the GPU is lost")
    own = Energy(2.0, 30.0, Provenance.ESTIMATED, ("15 W, as given",))
    found = reduced([(own, True), (absent_energy("another rank reads it", 2.0), False)], ESTIMATED)
    assert [each.provenance for each in found] == [Provenance.ESTIMATED] * 2


@pytest.mark.parametrize("figure", [0.0, math.nan, math.inf])
def test_a_sum_that_is_none_is_absent(figure):
    assert RankMeter(OTHERS, MEASURED, MEASURED).of_all(OWN, lambda own: figure).joules is None


def test_where_no_rank_has_a_meter_nothing_is_asked():
    none = MeterFacts(Provenance.ABSENT, reason="no driver")
    found = RankMeter(OTHERS, none, none).of_all(absent_energy("", 2.0), None)
    assert (found.joules, found.reason, found.seconds) == (None, "no driver", 2.0)


@pytest.mark.parametrize(
    ("seats", "found"),
    [
        ([MeterPlacement("a", 0), MeterPlacement("a", 1)], [(True, False), (False, False)]),
        ([MeterPlacement("a", 0), MeterPlacement("b", 0)], [(True, False), (True, False)]),
        (ON_TWO_GPUS, [(True, True), (False, True)]),
        (
            [MeterPlacement("a", 1, "x"), MeterPlacement("a", 0, "x")],
            [(False, False), (True, True)],
        ),  # two ranks, one GPU
        ([MeterPlacement("a", 0, "x"), MeterPlacement("b", 0, "x")], [(True, True), (True, True)]),
        (
            [MeterPlacement("a", 0), MeterPlacement("a", 0)],
            [(True, False), (False, False)],
        ),  # a launcher that numbers none
    ],
)
def test_each_meter_is_read_by_one_rank(seats, found):
    reads = [reads_of(seats, rank) for rank in range(len(seats))]
    assert [(each.processor, each.device) for each in reads] == found


def told(monkeypatch, seats: list[MeterPlacement], metering: Metering, found=None) -> list[RankMeter]:
    """Return what each rank of several counts, as if each of them had asked."""
    if found is not None:
        monkeypatch.setattr(rank_energy, "find_meter", lambda device, metering, reads: found(reads))

    def one(rank: int, facts: list) -> RankMeter:
        answers = iter((seats, facts))
        monkeypatch.setattr(rank_energy, "gather_objects", lambda own: (said.append(own), next(answers))[1])
        monkeypatch.setattr(rank_energy.dist, "get_rank", lambda: rank)
        return meter_of_rank(torch.device("cpu"), metering)

    said: list = []
    for rank in range(len(seats)):
        one(rank, [None] * (len(seats) - 1) + [MEASURED])
    facts = said[1::2]
    return [one(rank, facts) for rank in range(len(seats))]


def test_watts_of_a_machine_are_counted_once_though_each_rank_has_a_gpu(monkeypatch):
    ranks = told(monkeypatch, [*ON_TWO_GPUS, MeterPlacement("there", 0, "GPU-c")], Metering(watts=100))
    assert [isinstance(rank.meter, GivenWatts) for rank in ranks] == [True, False, True]
    assert [rank.is_reader for rank in ranks] == [True, False, True]
    assert {rank.job for rank in ranks} == {
        MeterFacts(Provenance.ESTIMATED, ("100 W, as given on here", "100 W, as given on there"), reason="")
    }


def test_a_meter_of_ones_own_is_of_a_machine_too():
    found = [reads_of(ON_TWO_GPUS, rank, Metering(meter=GivenWatts(5))) for rank in (0, 1)]
    assert found == [ReadCounters(True, False), ReadCounters(False, False)]


def test_what_all_ranks_count_is_the_same_on_each_and_a_record_says_what_is_not_in_it(monkeypatch):
    def found(reads: ReadCounters) -> SelectedMeter:
        names = ("nvml gpu 0", "rapl package-0") if reads.processor else ("nvml gpu 1",)
        return SelectedMeter(OTHERS, MeterFacts(Provenance.MEASURED, names, 50.0, ""))

    first, second = told(monkeypatch, ON_TWO_GPUS, Metering(), found)
    assert first.job == second.job
    assert first.job.sources == ("nvml gpu 0", "rapl package-0", "nvml gpu 1")
    assert (first.job.idle_w, first.job.uncounted) == (100.0, ())
    assert (first.own.sources, first.own.uncounted) == (("nvml gpu 0", "rapl package-0"), (OTHER_RANKS,))


def test_a_rank_without_its_meter_leaves_all_without(monkeypatch):
    def found(reads: ReadCounters) -> SelectedMeter:
        return SelectedMeter(OTHERS, MEASURED if reads.processor else MeterFacts(Provenance.ABSENT, reason="no driver"))

    for rank in told(monkeypatch, ON_TWO_GPUS, Metering(), found):
        assert (rank.job.is_absent, rank.job.reason) == (True, "no driver")


def test_one_process_reads_what_there_is(tmp_path):
    found = meter_of_rank(torch.device("cpu"), Metering(watts=5))
    assert isinstance(found.meter, GivenWatts)
    assert found.own == found.job
    assert meter_of_rank(torch.device("cpu"), Metering(root=tmp_path / "powercap")).job.is_absent


def test_a_launched_rank_sits_where_it_was_put(monkeypatch):
    seats = []
    monkeypatch.setattr(rank_energy, "job_position", lambda: JobPosition(3, 4, 1))
    monkeypatch.setattr(rank_energy, "gather_objects", lambda own: seats.append(own) or [own])
    meter_of_rank(torch.device("cpu"), Metering(watts=5))
    assert (seats[0].local_rank, seats[0].device) == (1, "")
