"""Save interval in windows or seconds, synchronised between ranks."""

from __future__ import annotations

import math
import time

from trimtab.checkpoint.config import Checkpoints
from trimtab.checkpoint.rank_checkpoints import RankCommunication

_LOOKS = 8  # minimum clock checks per interval, in addition to the early ones


class SaveInterval:
    """Counts windows and seconds since the last save.

    With several ranks, rank 0's clock decides. Asking rank 0 costs an exchange, so the ranks ask after 1, 2, 4, ...
    windows, and at least every eighth of `every_s` by the current speed, because windows may become slower.
    """

    def __init__(self, settings: Checkpoints, ranks: RankCommunication) -> None:
        self._settings, self._ranks = settings, ranks
        self._at: int | None = None
        self._windows, self._since_s = 0, time.monotonic()
        self._asks_at, self._asked_at, self._asked_s = 1, 0, self._since_s

    def begun(self, windows: int, *, is_saved: bool) -> None:
        """Restart the interval at `windows`. `is_saved` is False at the start of a new run and after a failed save."""
        self._at = windows if is_saved else None
        self._windows, self._since_s = windows, time.monotonic()
        self._asks_at, self._asked_at, self._asked_s = 1, 0, self._since_s

    def is_saved(self, windows: int) -> bool:
        """Return True if the last save was after `windows` windows."""
        return self._at == windows

    def is_due(self, windows: int) -> bool:
        """Return True if the next save is due."""
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
        """Return the number of windows since the last save at which to check the clock again; 0 if the save is due."""
        now_s = time.monotonic()
        left_s = self._since_s + every_s - now_s
        if left_s <= 0:
            return 0
        window_s = max(now_s - self._asked_s, 1e-6) / (since - self._asked_at)
        self._asked_at, self._asked_s = since, now_s
        return since + max(1, min(since, math.ceil(min(left_s, every_s / _LOOKS) / window_s)))
