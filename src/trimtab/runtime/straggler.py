"""Detection of slow ranks (stragglers)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_WINDOWS = 20  # Consecutive windows in which the same rank must be the slowest.
# Smallest ratio, and smallest difference in seconds, to the other ranks; smaller delays occur by chance.
_SHARE, _LEAST_S = 1.5, 0.002


@dataclass(frozen=True)
class SlowRank:
    """A slow rank.

    Args:
        rank: the slow rank.
        seconds: median time per window up to the reduction, of this rank.
        others_s: median time per window of the other ranks.
    """

    rank: int
    seconds: float
    others_s: float


class StragglerDetector:
    """Finds a rank that is the slowest in many consecutive windows; reports each rank once."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float, float]] = []
        self._named: set[int] = set()

    def add(self, seconds: Sequence[float]) -> SlowRank | None:
        """Add a window's time in seconds of each rank; return a newly detected slow rank, else None."""
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = statistics.median(each for rank, each in enumerate(seconds) if rank != slowest)
        is_late = seconds[slowest] > max(_SHARE * others, others + _LEAST_S)
        if not is_late or slowest in self._named or (self._seen and self._seen[0][0] != slowest):
            self._seen.clear()
        if not is_late or slowest in self._named:
            return None
        self._seen.append((slowest, seconds[slowest], others))
        if len(self._seen) < _WINDOWS:
            return None
        self._named.add(slowest)
        _, own, their = zip(*self._seen, strict=True)
        return SlowRank(slowest, statistics.median(own), statistics.median(their))
