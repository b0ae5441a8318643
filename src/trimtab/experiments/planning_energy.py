"""Energy of planning, counted alongside trials with their own power readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from trimtab.core.energy_reading import Energy
from trimtab.measure.energy_meter import EnergyClock, GivenWatts
from trimtab.measure.meter_selection import Metering, find_meter
from trimtab.measure.shared_meter import readers_of

T = TypeVar("T")


class PlanningMeter:
    """Counts the energy of parts of planning.

    The meter is read at progress messages; a meter that needs more frequent reads gives no figures.

    Attributes:
        metering: the metering for planning itself; a user's meter is split between both readers.
    """

    def __init__(self, device: torch.device, metering: Metering | None) -> None:
        given = metering or Metering()
        self._meter = find_meter(device, given).meter
        # Given watts can be read twice without loss.
        if given.meter is not None and not isinstance(given.meter, GivenWatts):
            self._meter, theirs = readers_of(given.meter, 2)
            given = replace(given, meter=theirs)
        self.metering = given
        self._clock = EnergyClock(self._meter)

    def heard(self, progress: Callable[[str], None]) -> Callable[[str], None]:
        """Return a progress callback that also reads the meter."""

        def said(text: str) -> None:
            self._clock.tick()
            progress(text)

        return said

    def counted(self, make: Callable[[], T]) -> tuple[T, Energy]:
        """Return the result of `make` with the energy spent on it."""
        self._clock = EnergyClock(self._meter)
        self._clock.start()
        made = make()
        return made, self._clock.read()
