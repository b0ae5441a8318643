"""Energy meters and a stopwatch for energy.

A meter counts joules from an arbitrary start; an interval is the difference of two readings. This module opens no
sockets and starts no threads or processes: the caller reads a meter between steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from trimtab.core import validation
from trimtab.core.energy_reading import WINDOW_S, Energy, Provenance, absent_energy, sum_energy

# Maximum fraction of a clock's seconds in intervals too short for the meter; these are excluded from joules and
# seconds.
_SHORT = 0.1
# Interval of meter readings in `tick`. Energy used between the last reading and a pause is not counted.
_DUE_S = WINDOW_S / 4


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
    """Absent meter with a reason and the code of its cause."""

    provenance, sources, period_s = Provenance.ABSENT, (), math.inf

    def __init__(self, reason: str, *, code: str = "meter.missing") -> None:
        self.reason, self.code = reason, code

    def joules(self) -> float:
        """Raise `MeterLost` with the reason."""
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


class SeveralMeters:
    """Sum of the meters of several devices; measured only if all of them are."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = tuple(meters)
        kinds = {meter.provenance for meter in self._meters}
        lowest = (Provenance.ABSENT, Provenance.ESTIMATED, Provenance.MEASURED)
        self.provenance = next(kind for kind in lowest if kind in kinds)
        self.sources = tuple(source for meter in self._meters for source in meter.sources)
        self.period_s = min(meter.period_s for meter in self._meters)

    def joules(self) -> float:
        """Return the sum. Every meter is read even after a failure, so that no further reading is lost."""
        found, lost = [], []
        for meter in self._meters:
            try:
                found.append(meter.joules())
            except MeterLost as reason:
                lost.append(str(reason))
        if lost:
            raise MeterLost("; ".join(lost))
        return math.fsum(found)


@dataclass(frozen=True)
class _Reading:
    """A reading of a meter.

    Attributes:
        at_s: Time of the reading.
        joules: Energy, or None after a failure.
        lost: Reason for unknown energy before the reading, or "".
    """

    at_s: float
    joules: float | None
    lost: str = ""

    @property
    def anew(self) -> _Reading:
        """The reading as the start of an interval, for which earlier losses do not matter."""
        return self if self.joules is None else replace(self, lost="")


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
        self._begun: _Reading | None = None  # start of the current interval; None while paused
        self._last = _Reading(clock(), None, "the energy clock was not started")
        self._whole: Energy | None = None
        self._short_s = 0.0
        self._ticked_at = clock()

    @property
    def seconds(self) -> float:
        """Seconds of the current interval; 0 while paused."""
        return 0.0 if self._begun is None else self._clock() - self._begun.at_s

    def start(self) -> None:
        """Start or resume. Energy since `pause` is not counted. No effect while running."""
        if self._begun is None:
            self._begun = self._last = self._reading().anew
            self._ticked_at = self._last.at_s

    def tick(self) -> None:
        """Read the meter if a reading is due. Call as often as possible, between steps."""
        if self._begun is None:
            return
        self._ticked_at = self._clock()
        if self._ticked_at - self._last.at_s >= self._due_s:
            self._last = self._reading(self._last.lost)

    def pause(self) -> None:
        """Stop at the last reading, at most a quarter of `WINDOW_S` before the last tick.

        The time from that reading to the last tick is added to the intervals that were too short.
        """
        if self._begun is not None:
            if self._meter.provenance is Provenance.MEASURED:
                self._short_s += max(0.0, self._ticked_at - self._last.at_s)
            self._close(self._begun)
            self._begun = None

    def lap(self) -> Energy:
        """Return the energy from the start or last lap to the last reading, and start a new interval there."""
        if self._begun is None:
            return absent_energy(self._last.lost or "the energy clock is paused")
        found, self._begun = self._close(self._begun), self._last.anew
        self._last = self._begun
        return found

    def read(self) -> Energy:
        """Return the total energy of all intervals including the current one, with the seconds it covers.

        The result is absent if a part is unknown, or if too much time lies in intervals too short for the meter. The
        clock continues unchanged: frequent calls do not shorten intervals.
        """
        whole, short_s = self._whole, self._short_s
        if self._begun is not None:
            self._last = self._reading(self._last.lost)
            whole, short_s = self._with(self._stretch(self._begun))
        known_s = 0.0 if whole is None else whole.seconds
        is_lost = whole is not None and whole.joules is None
        if not is_lost and short_s > _SHORT * (known_s + short_s):
            return absent_energy(self._too_short(short_s), known_s + short_s)
        return whole or absent_energy("the meter was not read")

    def _close(self, begun: _Reading) -> Energy:
        """Add the interval up to the last reading to the total, and return its energy."""
        found = self._stretch(begun)
        self._whole, self._short_s = self._with(found)
        return found[0]

    def _stretch(self, begun: _Reading) -> tuple[Energy, bool]:
        """Return the energy of an interval up to the last reading, and True if it is too short for the meter."""
        last, meter = self._last, self._meter
        seconds = last.at_s - begun.at_s
        if not seconds > 0:
            return absent_energy("the interval has a length of 0 s"), True
        if begun.joules is None or last.joules is None or last.lost:
            return absent_energy(last.lost or begun.lost, seconds), False
        if meter.provenance is Provenance.MEASURED and seconds < self._window_s:
            return absent_energy(self._too_short(seconds), seconds), True
        return _counted(last.joules - begun.joules, seconds, meter), False

    def _with(self, stretch: tuple[Energy, bool]) -> tuple[Energy | None, float]:
        """Return the total including an interval, and the seconds of all too short intervals."""
        found, is_short = stretch
        if is_short:
            return self._whole, self._short_s + found.seconds
        return found if self._whole is None else sum_energy((self._whole, found), in_turn=True), self._short_s

    def _too_short(self, seconds: float) -> str:
        return f"{seconds:.2g} s were in intervals of less than {self._window_s:g} s, which are too short for the meter"

    def _reading(self, lost: str = "") -> _Reading:
        joules, why = self._asked()
        if joules is None:  # the loss may concern only the past, so a second reading can succeed
            joules, _ = self._asked()
        return _Reading(self._clock(), joules, lost or why)

    def _asked(self) -> tuple[float | None, str]:
        try:
            return float(self._meter.joules()), ""
        except MeterLost as reason:
            return None, str(reason) or "the meter could not be read"
        except Exception as error:  # a user's meter may raise any exception, which must not end the run
            return None, f"the meter could not be read ({type(error).__name__}: {error})"


def _counted(joules: float, seconds: float, meter: Meter) -> Energy:
    if joules == 0:
        return absent_energy(f"{', '.join(meter.sources)} did not increase in {seconds:.3g} s", seconds)
    if not 0 < joules < math.inf:
        return absent_energy(
            f"{', '.join(meter.sources)} increased by {joules:g} J in {seconds:.3g} s, which is not a valid energy",
            seconds,
        )
    return Energy(seconds, joules, meter.provenance, tuple(meter.sources))
