"""What counts joules, and the clock of them.

A meter counts up from a moment of its own; a stretch is the difference of two readings. Nothing here opens a socket or
starts a thread or a process: a meter is read by whoever asks it, between steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from trimtab.core import checks
from trimtab.core.energy import WINDOW_S, Energy, Provenance, absent, summed

# Of a clock's seconds, what may lie in stretches that are too short for its meter; they are in no joule and no second.
_SHORT = 0.1
# A tick reads the meter so often: what ran between the last reading and a pause is lost.
_DUE_S = WINDOW_S / 4


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


@dataclass(frozen=True)
class _Reading:
    """What a meter showed; joules: None where it could not be read. lost: why what lies before is not known, or ""."""

    at_s: float
    joules: float | None
    lost: str = ""

    @property
    def anew(self) -> _Reading:
        """The same, as a beginning: what was lost before it is no matter."""
        return self if self.joules is None else replace(self, lost="")


class EnergyClock:
    """Joules of the time in which it runs, as of a stopwatch: `start`, `tick` while it runs, `pause`, `read`.

    A meter tells once what it lost, and tells it whoever asks: let no two clocks read the same one at a time. Whatever
    a meter raises makes joules unknown, and never ends what is measured.

    Args:
        window_s: a measured stretch that is shorter has no joules.
    """

    def __init__(
        self, meter: Meter, *, window_s: float = WINDOW_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._meter, self._window_s, self._clock = meter, window_s, clock
        self._due_s = min(_DUE_S, meter.period_s / 2)
        self._begun: _Reading | None = None  # of the stretch so far; None: it does not run
        self._last = _Reading(clock(), None, "it was not started")
        self._whole: Energy | None = None
        self._short_s = 0.0
        self._ticked_at = clock()

    @property
    def seconds(self) -> float:
        """Seconds of the stretch so far; 0 while it does not run."""
        return 0.0 if self._begun is None else self._clock() - self._begun.at_s

    def start(self) -> None:
        """Go on from here; what was since `pause` is in no joule. Nothing, where it runs."""
        if self._begun is None:
            self._begun = self._last = self._reading().anew
            self._ticked_at = self._last.at_s

    def tick(self) -> None:
        """Read the meter where that is due; to be called as often as may be, between steps."""
        if self._begun is None:
            return
        self._ticked_at = self._clock()
        if self._ticked_at - self._last.at_s >= self._due_s:
            self._last = self._reading(self._last.lost)

    def pause(self) -> None:
        """Stop at the last reading, a fourth of a second before the last tick at the most: what was since is left out.

        What it ran for from that reading to its last tick is among the stretches that were too short.
        """
        if self._begun is not None:
            if self._meter.provenance is Provenance.MEASURED:
                self._short_s += max(0.0, self._ticked_at - self._last.at_s)
            self._close(self._begun)
            self._begun = None

    def lap(self) -> Energy:
        """Return the stretch from its start, or the last lap, to the last reading; the next one begins there."""
        if self._begun is None:
            return absent(self._last.lost or "its clock does not run")
        found, self._begun = self._close(self._begun), self._last.anew
        self._last = self._begun
        return found

    def read(self) -> Energy:
        """Return what all stretches took, the one until now among them; its seconds are those that it is of.

        Absent where a part is not known, or too much of it lay in stretches that are too short for a meter. It goes on
        as it did: who reads it often makes no stretch shorter.
        """
        whole, short_s = self._whole, self._short_s
        if self._begun is not None:
            self._last = self._reading(self._last.lost)
            whole, short_s = self._with(self._stretch(self._begun))
        known_s = 0.0 if whole is None else whole.seconds
        is_lost = whole is not None and whole.joules is None
        if not is_lost and short_s > _SHORT * (known_s + short_s):
            return absent(self._too_short(short_s), known_s + short_s)
        return whole or absent("nothing was read")

    def _close(self, begun: _Reading) -> Energy:
        """Add the stretch up to the last reading to the whole, and return it."""
        found = self._stretch(begun)
        self._whole, self._short_s = self._with(found)
        return found[0]

    def _stretch(self, begun: _Reading) -> tuple[Energy, bool]:
        """Return what it took from there to the last reading, and whether that is too short for a meter."""
        last, meter = self._last, self._meter
        seconds = last.at_s - begun.at_s
        if not seconds > 0:
            return absent("no time has passed"), True
        if begun.joules is None or last.joules is None or last.lost:
            return absent(last.lost or begun.lost, seconds), False
        if meter.provenance is Provenance.MEASURED and seconds < self._window_s:
            return absent(self._too_short(seconds), seconds), True
        return _counted(last.joules - begun.joules, seconds, meter), False

    def _with(self, stretch: tuple[Energy, bool]) -> tuple[Energy | None, float]:
        """Return the whole with a stretch, and the seconds of those that are too short."""
        found, is_short = stretch
        if is_short:
            return self._whole, self._short_s + found.seconds
        return found if self._whole is None else summed((self._whole, found), in_turn=True), self._short_s

    def _too_short(self, seconds: float) -> str:
        return f"{seconds:.2g} s lie in windows of less than {self._window_s:g} s, of which a meter says nothing"

    def _reading(self, lost: str = "") -> _Reading:
        joules, why = self._asked()
        if joules is None:  # lost is what was before, perhaps: from here on it may be known
            joules, _ = self._asked()
        return _Reading(self._clock(), joules, lost or why)

    def _asked(self) -> tuple[float | None, str]:
        try:
            return float(self._meter.joules()), ""
        except MeterLost as reason:
            return None, str(reason) or "its meter could not be read"
        except Exception as error:  # a user's own may raise anything, and a run must not end by it
            return None, f"its meter could not be read ({type(error).__name__}: {error})"


def _counted(joules: float, seconds: float, meter: Meter) -> Energy:
    if joules == 0:
        return absent(f"{', '.join(meter.sources)} stood still for {seconds:.3g} s", seconds)
    if not 0 < joules < math.inf:
        return absent(f"{', '.join(meter.sources)} counted {joules:g} J in {seconds:.3g} s", seconds)
    return Energy(seconds, joules, meter.provenance, tuple(meter.sources))
