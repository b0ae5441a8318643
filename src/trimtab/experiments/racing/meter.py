"""The meter of a race: joules of each block of every rank together."""

from __future__ import annotations

import math

import torch

from trimtab.core.energy import WINDOW_S, MeterFacts, Provenance
from trimtab.distributed.alone import Together
from trimtab.distributed.energy import RankMeter, meter_of_rank
from trimtab.measure.energy import EnergyClock
from trimtab.measure.meters import Metering

# Of the shortest window of which a meter says something: ranks aim at a length, and half of what they hit is shorter.
_AIM = 1.1


class RaceMeter:
    """Joules of blocks; of several ranks each reads what is its own, and they are added up once a block."""

    def __init__(self, metered: RankMeter, together: Together) -> None:
        self._metered, self._together = metered, together
        self._clock = EnergyClock(metered.meter)

    @property
    def block_s(self) -> float:
        """Seconds that a block has to aim at to have joules."""
        return _AIM * WINDOW_S if self._metered.job.provenance is Provenance.MEASURED else 0.0

    def begin(self) -> None:
        """A block begins."""
        self._clock = EnergyClock(self._metered.meter)
        self._clock.start()

    def tick(self) -> None:
        """A step of it is done."""
        self._clock.tick()

    def end(self) -> float | None:
        """Return the joules of the block, or None where they are not known; all ranks call it, and wait."""
        return self._metered.of_all(self._clock.read(), lambda figure: math.fsum(self._together.each(figure))).joules


def race_meter(
    device: torch.device, metering: Metering | None, together: Together
) -> tuple[RaceMeter | None, MeterFacts]:
    """Return the meter of what races on a device, None where there is none; and what is said of it, alike on all."""
    found = meter_of_rank(device, metering, idle=True)
    return (None if found.job.is_absent else RaceMeter(found, together)), found.job
