"""The meter of a race: joules of each block of every rank together."""

from __future__ import annotations

import math

import torch

from trimtab.core.energy import MeterFacts
from trimtab.distributed.alone import Together
from trimtab.distributed.energy import of_all_ranks, reads_here
from trimtab.measure.energy import EnergyClock, Meter
from trimtab.measure.meters import Metering, Reads, find_meter, with_idle


class RaceMeter:
    """Joules of blocks; of several ranks each reads what is its own, and they are added up once a block."""

    def __init__(self, meter: Meter, reads: Reads, together: Together) -> None:
        self._laps, self._reads, self._together = EnergyClock(meter), reads, together

    def begin(self) -> None:
        """A block begins."""
        self._laps.restart()

    def tick(self) -> None:
        """A step of it is done."""
        self._laps.tick()

    def end(self) -> float | None:
        """Return the joules of the block, or None where they are not known; all ranks call it, and wait."""
        own = self._laps.lap()
        return of_all_ranks(own, self._reads, lambda figure: math.fsum(self._together.each(figure))).joules


def race_meter(
    device: torch.device, metering: Metering | None, together: Together
) -> tuple[RaceMeter | None, MeterFacts]:
    """Return the meter of what races on a device, None where there is none; and what is said of it, alike on all."""
    reads = reads_here(device)
    found = with_idle(find_meter(device, metering, reads=reads))
    facts = together.made(MeterFacts, lambda: found.facts)
    return (None if facts.is_absent else RaceMeter(found.meter, reads, together)), facts
