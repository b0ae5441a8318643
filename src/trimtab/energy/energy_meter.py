"""Energy meters and a stopwatch for energy.

A meter counts joules from an arbitrary start; an interval is the difference of two readings. This module opens no
sockets and starts no threads or processes: the caller reads a meter between steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from trimtab.core import validation
from trimtab.core.energy_reading import WINDOW_S, Energy, PowerLimit, Provenance, absent_energy, sum_energy

# Maximum fraction of a clock's seconds in intervals too short for the meter; these are excluded from joules and
# seconds.
_SHORT = 0.1
# Interval of meter readings in `tick`. Energy used between the last reading and a pause is not counted.
_DUE_S = WINDOW_S / 4
_BY_TRUST = (Provenance.ABSENT, Provenance.ESTIMATED, Provenance.MEASURED)


class MeterLost(Exception):
    """The meter is unreadable, or the energy since the last reading is unknown. Later readings may succeed.

    Args:
        code: stable identifier of the cause, such as "nvml.mig".
    """

    def __init__(self, reason: str = "", *, code: str = "meter.lost") -> None:
        super().__init__(reason)
        self.code = code


@runtime_checkable
class Meter(Protocol):
    """Interface of an energy meter; users can pass their own as `meter`.

    Attributes:
        provenance: Measured or estimated. An absent meter raises in `joules`.
        sources: Descriptions of the counters.
        period_s: Maximum seconds between two readings, or a reading is lost. Infinite for no limit.
    """

    @property
    def provenance(self) -> Provenance: ...

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def period_s(self) -> float: ...

    def joules(self) -> float:
        """Return the energy in joules since an arbitrary start; never decreases.

        Raises:
            MeterLost: The energy is unknown.
        """
        ...


class NoMeter:
    """Absent meter with a reason and the code of its cause, which `joules` raises as a `MeterLost`."""

    provenance, sources, period_s = Provenance.ABSENT, (), math.inf

    def __init__(self, reason: str, *, code: str = "meter.missing") -> None:
        self.reason, self.code = reason, code

    def joules(self) -> float:
        raise MeterLost(self.reason, code=self.code)


class GivenWatts:
    """Estimate from constant power given by the user, multiplied by time. Adds no information to the time."""

    provenance, period_s = Provenance.ESTIMATED, math.inf

    def __init__(self, watts: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.watts = validation.number("energy_watts", watts, low=0, open_low=True)
        self.sources: tuple[str, ...] = (f"{self.watts:g} W, as given",)
        self._clock, self._begun = clock, clock()

    def joules(self) -> float:
        """Return power times the seconds since creation."""
        return self.watts * (self._clock() - self._begun)


def limits_of(meter: Meter) -> tuple[PowerLimit, ...]:
    """Return the power limits of a meter's devices; none for a user's meter without the method `limits`."""
    limits: Callable[[], tuple[PowerLimit, ...]] = getattr(meter, "limits", tuple)
    return limits()


class SeveralMeters:
    """Sum of the meters of several devices; measured only if all of them are."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = tuple(meters)
        self.provenance = min((meter.provenance for meter in self._meters), key=_BY_TRUST.index)
        self.sources = tuple(source for meter in self._meters for source in meter.sources)
        self.period_s = min(meter.period_s for meter in self._meters)

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the power limits of all devices."""
        return tuple(limit for meter in self._meters for limit in limits_of(meter))

    def joules(self) -> float:
        """Return the sum. Every meter is read even after a failure, so that no further reading is lost."""
        total, lost = 0.0, []
        for meter in self._meters:
            try:
                total += meter.joules()
            except MeterLost as reason:
                lost.append(str(reason))
        if lost:
            raise MeterLost("; ".join(lost))
        return total


class EnergyClock:
    """Stopwatch for energy: `start`, `tick` while running, `pause`, `read`.

    A meter reports each loss once, to its next reader, so two clocks must not share a meter. An error in the meter
    makes the energy unknown but never interrupts the measured code.

    Args:
        window_s: Minimum length of a measured interval in seconds; a shorter interval has no energy value.
    """

    def __init__(
        self, meter: Meter, *, window_s: float = WINDOW_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._meter, self._window_s, self._clock = meter, window_s, clock
        self._due_s = min(_DUE_S, meter.period_s / 2)
        # Readings are pairs of seconds and joules (None after a failure).
        self._begun: tuple[float, float | None] | None = None  # begin of the current interval; None while paused
        self._last: tuple[float, float | None] = (clock(), None)
        self._lost = "the energy clock was not started"  # reason for unknown energy in the current interval, or ""
        self._ticked_at = self._last[0]
        self._whole: Energy | None = None  # sum of the intervals before the current one, without those too short
        self._short_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the current interval; 0 while paused."""
        return 0.0 if self._begun is None else self._clock() - self._begun[0]

    def start(self) -> None:
        """Start or resume. Energy since `pause` is not counted. No effect while running."""
        if self._begun is None:
            self._lost = ""
            self._read_meter()
            self._begin()
            self._ticked_at = self._last[0]

    def tick(self) -> None:
        """Read the meter if a reading is due. Call as often as possible, between steps."""
        if self._begun is not None:
            self._ticked_at = self._clock()
            if self._ticked_at - self._last[0] >= self._due_s:
                self._read_meter()

    def pause(self) -> None:
        """Stop at the last reading, at most a quarter of `WINDOW_S` before the last tick.

        The time from that reading to the last tick is added to the intervals that were too short.
        """
        if self._begun is not None:
            if self._meter.provenance is Provenance.MEASURED:
                self._short_s += max(0.0, self._ticked_at - self._last[0])
            self.lap()
            self._begun = None

    def lap(self) -> Energy:
        """Return the energy from the start or last lap to the last reading, and start a new interval there."""
        if self._begun is None:
            return absent_energy(self._lost or "the energy clock is paused")
        found = self._interval(self._begun)
        seconds = self._last[0] - self._begun[0]
        self._whole, self._short_s = self._totals(self._begun)
        self._begin()
        return found or absent_energy(self._too_short(seconds), seconds)

    def read(self) -> Energy:
        """Return the total energy of all intervals including the current one, with the seconds it covers.

        The result is absent if a part is unknown, or if too much time lies in intervals too short for the meter. The
        clock continues unchanged: frequent calls do not shorten intervals.
        """
        whole, short_s = self._whole, self._short_s
        if self._begun is not None:
            self._read_meter()
            whole, short_s = self._totals(self._begun)
        known_s = 0.0 if whole is None else whole.seconds
        is_lost = whole is not None and whole.joules is None
        if not is_lost and short_s > _SHORT * (known_s + short_s):
            return absent_energy(self._too_short(short_s), known_s + short_s)
        return whole or absent_energy("the meter was not read")

    def _begin(self) -> None:
        """Begin an interval at the last reading, for which earlier losses do not matter."""
        self._begun = self._last
        if self._last[1] is not None:
            self._lost = ""

    def _totals(self, begun: tuple[float, float | None]) -> tuple[Energy | None, float]:
        """Return the energy up to the last reading, and the seconds of all intervals too short for the meter."""
        found = self._interval(begun)
        if found is None:
            return self._whole, self._short_s + self._last[0] - begun[0]
        return found if self._whole is None else sum_energy((self._whole, found), in_turn=True), self._short_s

    def _interval(self, begun: tuple[float, float | None]) -> Energy | None:
        """Return the energy of an interval up to the last reading; None if it is too short for the meter."""
        (begun_at, begun_j), (last_at, last_j), meter = begun, self._last, self._meter
        seconds, sources = last_at - begun_at, tuple(meter.sources)
        if not seconds > 0:
            return None
        if begun_j is None or last_j is None or self._lost:
            return absent_energy(self._lost, seconds)
        if meter.provenance is Provenance.MEASURED and seconds < self._window_s:
            return None
        joules = last_j - begun_j
        if not 0 < joules < math.inf:
            reason = f"changed by {joules:g} J in {seconds:.3g} s, which is not a valid energy"
            return absent_energy(f"{', '.join(sources)} {reason}", seconds)
        return Energy(seconds, joules, meter.provenance, sources)

    def _too_short(self, seconds: float) -> str:
        return f"{seconds:.2g} s were in intervals of less than {self._window_s:g} s, which are too short for the meter"

    def _read_meter(self) -> None:
        """Read the meter, twice if the first reading fails: the failure may concern only the time before."""
        joules = None
        for _ in range(2):
            try:
                joules = float(self._meter.joules())
                break
            except MeterLost as reason:
                lost = str(reason) or "the meter could not be read"
            except Exception as error:  # a user's meter may raise any exception, which must not end the run
                lost = f"the meter could not be read ({type(error).__name__}: {error})"
            self._lost = self._lost or lost
        self._last = (self._clock(), joules)
