"""When a run is saved: after so many windows, or seconds, the same on every rank."""

from __future__ import annotations

import math
import time

from trimtab.checkpoint.ranks import KeptRanks
from trimtab.checkpoint.settings import Checkpoints

_LOOKS = 8  # at the clock between two saves, beside those after the first windows and near the end


class Pace:
    """Counts windows and seconds since the last save.

    Of several ranks the clock is rank 0's, and they do not ask for it in each window: after one, two, four and so on,
    and no later than an eighth of `every_s` would take by the pace since they last did, as windows may get slower.
    """

    def __init__(self, settings: Checkpoints, ranks: KeptRanks) -> None:
        self._settings, self._ranks = settings, ranks
        self._at: int | None = None
        self._windows, self._since_s = 0, time.monotonic()
        self._asks_at, self._asked_at, self._asked_s = 1, 0, self._since_s

    def begun(self, windows: int, *, is_saved: bool) -> None:
        """Count from so many windows on, after which the run is on disk, or could not be brought there, or begins."""
        self._at = windows if is_saved else None
        self._windows, self._since_s = windows, time.monotonic()
        self._asks_at, self._asked_at, self._asked_s = 1, 0, self._since_s

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
        if self._asks_at and since >= self._asks_at:
            every_s = settings.every_s
            self._asks_at = int(self._ranks.first(lambda: str(self._next(since, every_s)), f"pace/{windows}"))
        return not self._asks_at

    def _next(self, since: int, every_s: float) -> int:
        """Return after how many windows the clock is to be looked at next; 0: the seconds are over."""
        now_s = time.monotonic()
        left_s = self._since_s + every_s - now_s
        if left_s <= 0:
            return 0
        window_s = max(now_s - self._asked_s, 1e-6) / (since - self._asked_at)
        self._asked_at, self._asked_s = since, now_s
        return since + max(1, min(since, math.ceil(min(left_s, every_s / _LOOKS) / window_s)))
