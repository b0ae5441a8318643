"""Energy of planning, counted alongside trials with their own power readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from trimtab.core.energy_reading import Energy, PowerLimit, Provenance
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, Meter, MeterLost
from trimtab.energy.meter_selection import Metering, find_meter

# Several readers of a meter. A meter reports a loss once, so a reader forwards the loss to all readers.


class Reader:
    """A reader of a shared meter, itself a meter; created by `readers_of`. Readers must run in the same thread."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._others: tuple[Reader, ...] = ()
        self._missed = ""  # a loss reported to another reader but not yet to this one
        self.provenance: Provenance = meter.provenance
        self.sources: tuple[str, ...] = tuple(meter.sources)
        self.period_s: float = meter.period_s
        self.uncounted: tuple[str, ...] = tuple(getattr(meter, "uncounted", ()))

    def beside(self, others: tuple[Reader, ...]) -> None:
        """Set the other readers of the meter."""
        self._others = others

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the meter's power limits."""
        return tuple(self._meter.limits()) if hasattr(self._meter, "limits") else ()

    def joules(self) -> float:
        """Return the energy in joules. Errors of the meter are raised unchanged.

        Raises:
            MeterLost: The energy is unknown, or was unknown at a reading by another reader.
        """
        try:
            found = self._meter.joules()
        except Exception as error:
            for other in self._others:
                other._missed = str(error) or "the meter could not be read"
            raise
        if self._missed:
            missed, self._missed = self._missed, ""
            raise MeterLost(missed)
        return found


def readers_of(meter: Meter, number: int) -> tuple[Reader, ...]:
    """Return `number` readers of a meter, each of which receives every loss."""
    readers = tuple(Reader(meter) for _ in range(number))
    for reader in readers:
        reader.beside(tuple(other for other in readers if other is not reader))
    return readers


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
