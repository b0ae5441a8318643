"""What counts joules, and windows of them.

A meter counts up from a moment of its own; a window is the difference of two readings. Nothing here opens a socket or
starts a thread or a process: a meter is read by whoever asks it, between steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from trimtab.core import checks
from trimtab.core.energy import WINDOW_S, Energy, Provenance, absent


class MeterLost(Exception):
    """A meter that cannot be read, or whose reading since the last one is not known; the next may be again."""


@runtime_checkable
class Meter(Protocol):
    """What counts joules; a user's own has these four, and is given as `meter`.

    Attributes:
        provenance: measured, or estimated; one that is absent raises in `joules`. sources: what it reads, in words.
        period_s: it has to be read at least so often, or a reading is lost; infinite: whenever.
    """

    @property
    def provenance(self) -> Provenance: ...

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def period_s(self) -> float: ...

    def joules(self) -> float:
        """Return the joules counted since some moment, which never fall.

        Raises:
            MeterLost: they are not known.
        """
        ...


class NoMeter:
    """Counts nothing, and says why."""

    provenance, sources, period_s = Provenance.ABSENT, (), math.inf

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def joules(self) -> float:
        """Raise: there are none."""
        raise MeterLost(self.reason)


class GivenWatts:
    """Estimates: watts that a user gives, times seconds. Says nothing that the seconds do not say already."""

    provenance, period_s = Provenance.ESTIMATED, math.inf

    def __init__(self, watts: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.watts = checks.number("energy_watts", watts, low=0, open_low=True)
        self.sources: tuple[str, ...] = (f"{self.watts:g} W, as given",)
        self._clock, self._begun = clock, clock()

    def joules(self) -> float:
        """Return watts times the seconds since it was made."""
        return self.watts * (self._clock() - self._begun)


class SeveralMeters:
    """Meters of several devices as one: measured where all of them are."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = tuple(meters)
        kinds = {meter.provenance for meter in self._meters}
        lowest = (Provenance.ABSENT, Provenance.ESTIMATED, Provenance.MEASURED)
        self.provenance = next(kind for kind in lowest if kind in kinds)
        self.sources = tuple(source for meter in self._meters for source in meter.sources)
        self.period_s = min(meter.period_s for meter in self._meters)

    def joules(self) -> float:
        """Return the sum of all; each is read, also where one is lost, so that no other one is for that."""
        found, lost = [], []
        for meter in self._meters:
            try:
                found.append(meter.joules())
            except MeterLost as reason:
                lost.append(str(reason))
        if lost:
            raise MeterLost("; ".join(lost))
        return math.fsum(found)


class EnergyClock:
    """Laps of a meter, as of a stopwatch: each begins where the last one ended.

    Args:
        window_s: a measured lap that is shorter has no joules.
    """

    def __init__(
        self, meter: Meter, *, window_s: float = WINDOW_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.meter, self._window_s, self._clock = meter, window_s, clock
        self._lost, self._read_at = "", clock()
        self.restart()

    @property
    def seconds(self) -> float:
        """Seconds of the lap so far."""
        return self._clock() - self._begun

    def tick(self) -> None:
        """Read the meter where that is due; to be called as often as may be, between steps."""
        if self._clock() - self._read_at >= min(WINDOW_S, self.meter.period_s / 2):
            self._read()

    def restart(self) -> None:
        """Begin a lap here; what was since the last one is dropped."""
        begun_j = self._read()
        if begun_j is None:  # lost is what was before, perhaps
            begun_j = self._read()
        self._begun_j, self._begun = begun_j, self._read_at
        self._lost = self._lost if begun_j is None else ""

    def lap(self) -> Energy:
        """Return what the lap took, and begin the next one."""
        begun, before, now = self._begun, self._begun_j, self._read()
        lost, ended = self._lost, self._read_at
        if now is None:
            self.restart()
        else:
            self._begun, self._begun_j, self._lost = ended, now, ""
        return self._energy(ended - begun, before, now, lost)

    def _energy(self, seconds: float, before: float | None, now: float | None, lost: str) -> Energy:
        meter = self.meter
        if lost or before is None or now is None:
            return absent(lost or "its meter could not be read", seconds)
        if meter.provenance is Provenance.MEASURED and seconds < self._window_s:
            return absent(f"a window of {seconds:.2g} s, and a meter says nothing below {self._window_s:g} s", seconds)
        if not now > before:
            return absent(f"{', '.join(meter.sources)} stood still for {seconds:.3g} s", seconds)
        return Energy(seconds, now - before, meter.provenance, meter.sources)

    def _read(self) -> float | None:
        try:
            return self.meter.joules()
        except MeterLost as reason:
            self._lost = str(reason)
            return None
        finally:
            self._read_at = self._clock()
