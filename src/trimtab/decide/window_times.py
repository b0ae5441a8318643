"""Seconds of a micro-batch and of what a window has besides, from the windows of a run (math: section 4)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from trimtab.core import checks
from trimtab.core.errors import FormatError
from trimtab.core.state_parts import Load, Part
from trimtab.decide.goodput import Times

# Windows looked back on, and of the first ones how many are dropped: kernels are chosen and memory is found in them.
MEMORY, SKIPPED = 50, 2
MIN_WINDOWS = 3


class UsualWindow:
    """What a loader batch takes in windows that nothing was added to: the median of the last few."""

    def __init__(self) -> None:
        self._batch_s: deque[float] = deque(maxlen=15)

    def add(self, seconds: float, num_batches: int) -> None:
        """Take such a window in."""
        self._batch_s.append(seconds / num_batches)

    def extra(self, seconds: float, num_batches: int) -> float:
        """Return what a window took beyond as many batches of the usual ones; 0 while those are not known."""
        return max(0.0, seconds - num_batches * statistics.median(self._batch_s)) if self._batch_s else 0.0


class WindowTimes(Part):
    """Medians over the last windows: a disturbed one weighs nothing."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._row_s: deque[float] = deque(maxlen=memory)
        self._fixed_s: deque[float] = deque(maxlen=memory)
        self._seen = 0
        self._since_loaded: int | None = None

    def add(self, row_s: float, fixed_s: float) -> None:
        """Take a window in.

        Args:
            row_s: seconds of a row in the loader batches between the first, which adds to no gradient, and the last,
                which holds the reduction; drawing included.
            fixed_s: what the window took beyond as much for each of its rows.
        """
        self._seen += 1
        if self._since_loaded is not None and self._since_loaded < 0:  # kernels are chosen anew
            self._since_loaded += 1
        elif self._seen > SKIPPED:
            self._row_s.append(row_s)
            self._fixed_s.append(max(0.0, fixed_s))
            self._drop_loaded()

    def _drop_loaded(self) -> None:
        """Forget what was loaded as soon as there is enough without it: it may be another machine's."""
        if self._since_loaded is None:
            return
        self._since_loaded += 1
        if self._since_loaded == MIN_WINDOWS:
            for kept in (self._row_s, self._fixed_s):
                own = list(kept)[-MIN_WINDOWS:]
                kept.clear()
                kept.extend(own)
            self._since_loaded = None

    def forget(self) -> None:
        """Begin anew."""
        self._row_s.clear()
        self._fixed_s.clear()
        self._seen, self._since_loaded = 0, None

    @property
    def is_known(self) -> bool:
        """Whether enough windows were seen."""
        return len(self._row_s) >= MIN_WINDOWS

    @property
    def is_own(self) -> bool:
        """Whether enough were seen since the state of another run, on another machine it may be, was loaded."""
        return self.is_known and self._since_loaded is None

    def times(self, micro_rows: float) -> Times | None:
        """Return the times of micro-batches of so many rows; None while too few windows were seen."""
        if not self.is_known:
            return None
        return Times(statistics.median(self._row_s) * micro_rows, statistics.median(self._fixed_s))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"row_s": list(self._row_s), "fixed_s": list(self._fixed_s), "seen": self._seen}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        names = ("row_s", "fixed_s")
        lists = isinstance(state, Mapping) and all(isinstance(state.get(name), list) for name in names)
        if not lists or len(state["row_s"]) != len(state["fixed_s"]):
            raise FormatError("state.times", given=f"{state!r:.80}", expected="two lists of one length: row_s, fixed_s")
        seen = checks.integer("state.times.seen", state.get("seen"), low=0)
        row_s, fixed_s = ([checks.number(f"state.times.{n}", v, low=0) for v in state[n]] for n in names)

        def load() -> None:
            self._seen, self._since_loaded = seen, -SKIPPED
            for kept, loaded in ((self._row_s, row_s), (self._fixed_s, fixed_s)):
                kept.clear()
                kept.extend(loaded)

        return load
