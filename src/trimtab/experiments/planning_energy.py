"""Joules that planning takes, counted beside the trials that read watts of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from trimtab.core.energy import Energy
from trimtab.measure.energy import EnergyClock, GivenWatts
from trimtab.measure.meter_readers import readers_of
from trimtab.measure.meters import Metering, find_meter

T = TypeVar("T")


class PlanningMeter:
    """Counts stretches of planning.

    It is read where planning says how far it is; a meter that has to be read more often than that loses them.

    Attributes:
        metering: how planning itself is to read joules; a meter of the user's own tells both what it lost.
    """

    def __init__(self, device: torch.device, metering: Metering | None) -> None:
        given = metering or Metering()
        self._meter = find_meter(device, given).meter
        if given.meter is not None and not isinstance(given.meter, GivenWatts):  # which loses nothing
            self._meter, theirs = readers_of(given.meter, 2)
            given = replace(given, meter=theirs)
        self.metering = given
        self._clock = EnergyClock(self._meter)

    def heard(self, progress: Callable[[str], None]) -> Callable[[str], None]:
        """Return what planning says how far it is to, so that the meter is read then."""

        def said(text: str) -> None:
            self._clock.tick()
            progress(text)

        return said

    def counted(self, make: Callable[[], T]) -> tuple[T, Energy]:
        """Return what is made, and what that took."""
        self._clock = EnergyClock(self._meter)
        self._clock.start()
        made = make()
        return made, self._clock.read()
