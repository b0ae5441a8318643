"""Joules of ranks: one reduction, in which a rank that reads nothing adds nothing and one without a meter all doubt."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.core.energy import Energy, Provenance, absent
from trimtab.distributed.energy import of_all_ranks, reads_here
from trimtab.measure.meters import Reads

BOTH, PROCESSOR, NOTHING = Reads(True, True), Reads(True, False), Reads(False, False)
OWN = Energy(2.0, 30.0, Provenance.MEASURED, ("rapl package-0",))


def reduced(parts: list[tuple[Energy, Reads]]) -> list[Energy]:
    """Return what each rank is told, by a sum over what all of them say."""
    said: list[float] = []
    for own, reads in parts:
        of_all_ranks(own, reads, lambda figure: said.append(figure) or 1.0)
    return [of_all_ranks(own, reads, lambda figure: math.fsum(said)) for own, reads in parts]


def test_ranks_of_one_machine_add_up_to_what_one_of_them_read():
    first, second = reduced([(OWN, PROCESSOR), (absent("another rank reads it", 2.0), NOTHING)])
    assert (first.joules, first.provenance, first.sources) == (30.0, Provenance.MEASURED, OWN.sources)
    assert second.joules == 30.0


def test_ranks_of_several_devices_add_theirs():
    assert [each.joules for each in reduced([(OWN, BOTH), (OWN, BOTH)])] == [60.0, 60.0]


def test_a_rank_whose_meter_was_lost_makes_all_unknown():
    first, second = reduced([(OWN, BOTH), (absent("the GPU is lost", 2.0), BOTH)])
    assert (first.joules, second.joules) == (None, None)
    assert (first.reason, second.reason) == ("a rank has no meter", "the GPU is lost")


def test_estimates_stay_estimates():
    own = Energy(2.0, 30.0, Provenance.ESTIMATED, ("15 W, as given",))
    assert reduced([(own, PROCESSOR)])[0].provenance is Provenance.ESTIMATED


@pytest.mark.parametrize("figure", [0.0, math.nan, math.inf])
def test_a_sum_that_is_none_is_absent(figure):
    assert of_all_ranks(OWN, BOTH, lambda own: figure).joules is None


def test_one_process_reads_what_there_is():
    assert reads_here(torch.device("cpu")) == Reads(processor=True, device=False)
