"""Which rank the others wait for, window after window."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_WINDOWS = 20  # in a row, in which one rank was the last
_SHARE, _LEAST_S = 1.5, 0.002  # by which it took longer than the others, as one of them does now and then


@dataclass(frozen=True)
class Late:
    """A rank that took longer than others. `seconds`, `others_s`: a window, medians; up to its reduction."""

    rank: int
    seconds: float
    others_s: float


class Straggler:
    """Finds the rank that is waited for in every one of some windows; says so once for each rank."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float, float]] = []
        self._named: set[int] = set()

    def add(self, seconds: Sequence[float]) -> Late | None:
        """Take in what each rank took for a window by itself; returns the one that is late, once it is known."""
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
        return Late(slowest, statistics.median(own), statistics.median(their))
