"""Energy meter of a paired run: joules per block, summed over ranks."""

from __future__ import annotations

import math

import torch

from trimtab.core.energy_reading import WINDOW_S, MeterFacts, Provenance
from trimtab.distributed.coordinator import Coordinator
from trimtab.distributed.rank_energy import RankMeter, meter_of_rank
from trimtab.energy.energy_meter import EnergyClock
from trimtab.energy.meter_selection import Metering

# Target length of a block, relative to the shortest window of a meter: half of all blocks end shorter than the target.
_AIM = 1.1


class PairedRunMeter:
    """Joules per block; every rank reads its own meter, and readings are summed once per block."""

    def __init__(self, metered: RankMeter, together: Coordinator) -> None:
        self._metered, self._together = metered, together
        self._clock = EnergyClock(metered.meter)

    @property
    def block_s(self) -> float:
        """Target seconds of a block, long enough for a reading."""
        return _AIM * WINDOW_S if self._metered.job.provenance is Provenance.MEASURED else 0.0

    def begin(self) -> None:
        """Begin a block."""
        self._clock = EnergyClock(self._metered.meter)
        self._clock.start()

    def tick(self) -> None:
        """Record the end of a step."""
        self._clock.tick()

    def end(self) -> float | None:
        """Return the joules of the block, or None if unknown. Collective: all ranks must call it."""
        return self._metered.of_all(self._clock.read(), lambda figure: math.fsum(self._together.each(figure))).joules


def race_meter(
    device: torch.device, metering: Metering | None, together: Coordinator
) -> tuple[PairedRunMeter | None, MeterFacts]:
    """Return the meter of a device, or None without one, and its description, equal on all ranks."""
    found = meter_of_rank(device, metering, idle=True)
    return (None if found.job.is_absent else PairedRunMeter(found, together)), found.job
