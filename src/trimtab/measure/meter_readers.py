"""One meter, several readers: a meter tells once what it lost, and each of them has to hear of it."""

from __future__ import annotations

from trimtab.core.energy import PowerLimit, Provenance
from trimtab.measure.energy import Meter, MeterLost


class Reader:
    """One of several that read a meter in turn, on one thread; itself a meter. `readers_of` makes them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._others: tuple[Reader, ...] = ()
        self._missed = ""  # what another was told that this one was not
        self.provenance: Provenance = meter.provenance
        self.sources: tuple[str, ...] = tuple(meter.sources)
        self.period_s: float = meter.period_s
        self.uncounted: tuple[str, ...] = tuple(getattr(meter, "uncounted", ()))

    def beside(self, others: tuple[Reader, ...]) -> None:
        """Say who reads the same meter."""
        self._others = others

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the power limits that the meter knows of."""
        return tuple(self._meter.limits()) if hasattr(self._meter, "limits") else ()

    def joules(self) -> float:
        """Return the joules counted so far.

        Raises:
            MeterLost: they are not known, or were not known to another that read them since. Whatever the meter raises.
        """
        try:
            found = self._meter.joules()
        except Exception as error:
            for other in self._others:
                other._missed = str(error) or "its meter could not be read"
            raise
        if self._missed:
            missed, self._missed = self._missed, ""
            raise MeterLost(missed)
        return found


def readers_of(meter: Meter, number: int) -> tuple[Reader, ...]:
    """Return so many readers of a meter, each of which is told of all that is lost."""
    readers = tuple(Reader(meter) for _ in range(number))
    for reader in readers:
        reader.beside(tuple(other for other in readers if other is not reader))
    return readers
