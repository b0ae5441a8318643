"""Joules of a run, by readings between its windows; a device's queue is not waited for, nor is there a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trimtab.core.energy import WINDOW_S, Energy, Provenance, absent, summed
from trimtab.measure.energy import Meter, MeterLost

# How often a record has a line of them: what a device still has queued is then small beside it.
LINE_S = 10.0
# Of a run's seconds, what may lie in stretches that are too short for its meter; they are in no joule and no second.
_SHORT = 0.1

_Reading = tuple[float, float | None]


class RunEnergy:
    """Joules from the first window to the last, less what lies between a window and an evaluation that is told of."""

    def __init__(self, meter: Meter, line_s: float = LINE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._meter, self._line_s, self._clock = meter, line_s, clock
        self._due_s = min(WINDOW_S, meter.period_s / 2)
        self._parts: list[Energy] = []
        self._short_s, self._lost = 0.0, ""
        self._begun = self._last = self._told = self._read()

    def step(self) -> dict[str, Any] | None:
        """Note that a window is done; returns what a record's line says of the time since the last one, or None."""
        if self._clock() - self._last[0] < self._due_s:
            return None
        self._last = self._read()
        if self._last[0] - self._told[0] < self._line_s:
            return None
        told, self._told = self._told, self._last
        return _detail(self._between(told, self._last))

    def pause(self) -> None:
        """Leave out what was since the last reading, within a second of the last window: it was no training."""
        self._close()
        self._begun = self._last = self._told = self._read()

    def total(self) -> Energy:
        """Return what all took, absent where a part is not known; its seconds are those that it is of."""
        self._last = self._read()
        self._close()
        self._begun = self._told = self._last
        found = summed(self._parts, in_turn=True)
        if self._short_s > _SHORT * (found.seconds + self._short_s):
            return absent(f"{self._short_s:.2g} s lie in windows of less than {WINDOW_S:g} s", self._short_s)
        return found

    def end(self) -> dict[str, Any]:
        """Return the total as a record's last line has it."""
        return _detail(self.total())

    def _close(self) -> None:
        part = self._between(self._begun, self._last)
        is_measured = self._meter.provenance is Provenance.MEASURED
        if is_measured and not self._lost and part.seconds < WINDOW_S:
            self._short_s += part.seconds
        elif part.seconds > 0:
            self._parts.append(part)
        self._lost = ""

    def _between(self, before: _Reading, after: _Reading) -> Energy:
        seconds = after[0] - before[0]
        if self._lost or before[1] is None or after[1] is None:
            return absent(self._lost or "its meter could not be read", seconds)
        if not after[1] > before[1]:
            return absent(f"{', '.join(self._meter.sources)} stood still for {seconds:.3g} s", seconds)
        return Energy(seconds, after[1] - before[1], self._meter.provenance, tuple(self._meter.sources))

    def _read(self) -> _Reading:
        try:
            joules = self._meter.joules()
        except MeterLost as reason:
            joules, self._lost = None, str(reason)
        return self._clock(), joules


def _detail(energy: Energy) -> dict[str, Any]:
    known = {"energy_j": energy.joules, "energy_s": energy.seconds, "energy": energy.provenance.value}
    return known if energy.joules is not None else known | {"energy_reason": energy.reason}
