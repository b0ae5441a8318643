"""When a run is saved: after so many windows, or seconds, the same on every rank."""

from __future__ import annotations

import math
import time

from trimtab.checkpoint.ranks import KeptRanks
from trimtab.checkpoint.settings import Checkpoints

# Windows after a save, by which several ranks agree in how many the next one is: none asks another in each.
_SEEN = 5


class Pace:
    """Counts windows and seconds since the last save."""

    def __init__(self, settings: Checkpoints, ranks: KeptRanks) -> None:
        self._settings, self._ranks = settings, ranks
        self._at: int | None = None
        self._windows, self._since_s = 0, time.monotonic()
        self._agreed: int | None = None

    def begun(self, windows: int, *, is_saved: bool) -> None:
        """Count from so many windows on, after which the run is on disk, or could not be brought there, or begins."""
        self._at = windows if is_saved else None
        self._windows, self._since_s, self._agreed = windows, time.monotonic(), None

    def is_saved(self, windows: int) -> bool:
        """Return whether that was after as many."""
        return self._at == windows

    def is_due(self, windows: int) -> bool:
        """Return whether the next save is."""
        since, settings = windows - self._windows, self._settings
        if since <= 0:
            return False
        if settings.every_steps is not None and since >= settings.every_steps:
            return True
        if settings.every_s is None:
            return False
        if self._ranks.num == 1:
            return time.monotonic() - self._since_s >= settings.every_s
        if since == _SEEN:
            wanted = self._ranks.first(lambda: str(self._wanted(since, settings.every_s or 0.0)), f"pace/{windows}")
            self._agreed = int(wanted)
        return self._agreed is not None and since >= self._agreed

    def _wanted(self, since: int, every_s: float) -> int:
        """Return in how many windows so many seconds are over, by those since the last save."""
        return max(since, math.ceil(every_s * since / max(time.monotonic() - self._since_s, 1e-6)))
