"""Several readers of a meter. A meter reports a loss once, so a reader forwards the loss to all readers."""

from __future__ import annotations

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.measure.energy_meter import Meter, MeterLost


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
