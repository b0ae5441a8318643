"""Overhead budget: measures a run-time technique's cost and benefit, and pauses a technique that does not pay.

Price and gain are fractions of the step time. A technique that only measures, such as the noise monitor, runs rarely
enough to stay within the limit. A technique with a gain below the price is paused, twice as long every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core import validation
from trimtab.core.stateful import Load, Stateful, require_keys

# LIMIT is the fraction of step time that measuring may take. At the start of a run, where nothing is known yet, EARLY
# of the step time is allowed in addition, up to the time of ALLOWANCE steps.
LIMIT = 0.0025
EARLY, ALLOWANCE = 0.04, 8.0
# The first steps of a run are not representative. Uses are spread out, so that no single period decides.
FRESH, SPREAD = 10, 0.05
# Steps between two reviews, and of the first pause.
REVIEW, PAUSE = 100, 200
MOST_PAUSE = 10 * PAUSE  # noise grows by an order of magnitude while a model is trained
# Number of uses after which an unknown gain counts as zero.
PATIENCE = 50


@dataclass(frozen=True)
class OverheadReview:
    """Result of a review; price and gain are fractions of the step time."""

    technique: str
    price: float
    gain: float
    pays: bool
    pause: int = 0


class OverheadBudget(Stateful):
    """Overhead account of a technique.

    All ranks pass the same figures, because they must agree on the steps that use the technique.
    """

    _COUNTS = ("windows", "uses", "opened", "last", "pause", "pause_left", "reviewed", "began", "untold")
    _FIELDS = (*_COUNTS, "spent_s", "used_s")

    def __init__(self, technique: str, limit: float = LIMIT) -> None:
        self.technique, self._limit = technique, limit
        self.windows = self.uses = self.opened = self.last = 0
        self.pause_left = self.reviewed = self.began = self.untold = 0
        self.spent_s = self.used_s = 0.0
        self.pause = PAUSE

    @property
    def is_paused(self) -> bool:
        """True while the technique is paused."""
        return self.pause_left > 0

    @property
    def price(self) -> float:
        """Cost of a single use, as a fraction of the step time; 0 while unknown."""
        return self.spent_s / self.used_s if self.used_s > 0 else 0.0

    @property
    def every(self) -> int:
        """Least number of steps per use that keeps the cost within the limit."""
        return max(1, math.ceil(self.price / self._limit - 1e-9))

    def is_due(self, sparse: int = 0) -> bool:
        """Return True if the next step should use the technique: the overhead budget so far pays for another use.

        Args:
            sparse: use only every `sparse`-th step; 0: keep the minimum distance to the last use.
        """
        if self.is_paused or self.windows < FRESH:
            return False
        may_spend = self._limit * self.windows + min(EARLY * self.windows, ALLOWANCE)
        if self.price * (self.opened + 1) > may_spend:
            return False
        if sparse:
            return self.windows % sparse == 0
        spread = math.ceil(SPREAD * max(0, self.last - self.began))
        return self.windows - self.last >= min(self.every, spread)

    def use(self) -> None:
        """Record that the technique is used in the next step; its cost is charged later."""
        self.last = self.windows
        self.opened += 1

    def pass_window(self) -> None:
        """Count a step. The review interval restarts after a pause."""
        self.windows += 1
        if self.is_paused:
            self.pause_left -= 1
            self.reviewed = self.began = self.windows
            self.untold = 0

    @property
    def share(self) -> float:
        """Overhead so far, as a fraction of the time of all steps."""
        return self.price * self.uses / self.windows if self.windows else 0.0

    def charge(self, window_s: float, spent_s: float) -> None:
        """Record the cost of a use.

        Args:
            window_s: seconds of the whole step.
            spent_s: seconds spent on the technique.
        """
        self.uses += 1
        self.untold += 1
        self.used_s += window_s
        self.spent_s += spent_s

    def review(self, gain: float | None, prospect: Callable[[], float] = lambda: 0.0) -> OverheadReview | None:
        """Return the result of a review; None if the next review is not due or the gain is unknown.

        Args:
            gain: fraction of time saved by the technique, by the best estimate; None while unknown.
            prospect: returns the fraction possibly saved by the end of a pause; if it covers the price, the pause is
                postponed.
        """
        if gain is not None:
            self.untold = 0
        elif self.untold >= PATIENCE:
            gain, prospect = 0.0, lambda: 0.0
        if gain is None or self.is_paused or self.windows - self.reviewed < REVIEW:
            return None
        self.reviewed = self.windows
        price = self.price / self.every
        if gain >= price:
            self.pause = PAUSE
            return OverheadReview(self.technique, price, gain, True)
        if prospect() >= price:
            return None
        pause, self.pause_left = self.pause, self.pause
        self.pause = min(2 * self.pause, MOST_PAUSE)
        return OverheadReview(self.technique, price, gain, False, pause)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and times for a resumed run."""
        return {name: getattr(self, name) for name in self._FIELDS}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Validate `state_dict()` and return a function that loads the state.

        Raises:
            FormatError, ValueGivenError: the state is invalid.
        """
        where = f"state.{self.technique}"
        require_keys(where, state, self._FIELDS)
        for name, value in state.items():
            check = validation.integer if name in self._COUNTS else validation.number
            check(f"{where}.{name}", value, low=0)

        def load() -> None:
            for name, value in state.items():
                setattr(self, name, value)

        return load
