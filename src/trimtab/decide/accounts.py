"""What a technique costs and what it brings while a run goes on: what does not pay is paused, with both figures.

Price and yield are shares of a window's time. A technique that only measures, as the noise monitor does, is thinned out
until it costs what it may; one whose yield stays below its price is paused, each time for twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core import checks
from trimtab.core.state_parts import Load, Part, require_keys

# What measuring may cost of the windows' time; and on top of it, while nothing is known, this share of the first ones,
# up to the time of so many windows.
LIMIT = 0.0025
EARLY, ALLOWANCE = 0.04, 8.0
# A run's very first windows are not used: they are like none that follow. Uses are spread, so that no moment decides.
FRESH, SPREAD = 10, 0.05
# Windows between two looks at an account, and of the first pause.
REVIEW, PAUSE = 100, 200
MOST_PAUSE = 10 * PAUSE  # noise grows by an order of magnitude while a model is trained
# Uses after which a yield that could not be told is taken for none.
PATIENCE = 50


@dataclass(frozen=True)
class Review:
    """What a look at an account found: shares of a window's time."""

    technique: str
    price: float
    gain: float
    pays: bool
    pause: int = 0


class Account(Part):
    """The account of one technique, from figures that all ranks share: they have to agree on when it is used."""

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
        """Whether it is not to be used for now."""
        return self.pause_left > 0

    @property
    def price(self) -> float:
        """Share of a window's time that one use takes; 0 while unknown."""
        return self.spent_s / self.used_s if self.used_s > 0 else 0.0

    @property
    def every(self) -> int:
        """In how many windows it may be used once, by its price so far."""
        return max(1, math.ceil(self.price / self._limit - 1e-9))

    def is_due(self, sparse: int = 0) -> bool:
        """Return whether the next window is one to use it in: what went before pays for it.

        Args:
            sparse: one window in so many may be; 0: where it is not too soon after the last.
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
        """The window that is passed next is one that it was used in; what that took is charged later."""
        self.last = self.windows
        self.opened += 1

    def pass_window(self) -> None:
        """A window is over. After a pause it begins anew."""
        self.windows += 1
        if self.is_paused:
            self.pause_left -= 1
            self.reviewed = self.began = self.windows
            self.untold = 0

    @property
    def share(self) -> float:
        """Share of all windows' time that it took so far, those of a like time that it was not used in counted."""
        return self.price * self.uses / self.windows if self.windows else 0.0

    def charge(self, window_s: float, spent_s: float) -> None:
        """Note what one use took, of a window of so many seconds."""
        self.uses += 1
        self.untold += 1
        self.used_s += window_s
        self.spent_s += spent_s

    def review(self, gain: float | None, prospect: Callable[[], float] = lambda: 0.0) -> Review | None:
        """Return what a look at the account finds; None before it is time for one, or while the gain is unknown.

        Args:
            gain: share of time that the technique saves, by the best that is known of it; None while that is nothing.
            prospect: returns what it may come to save by the end of a pause: one that would miss that is put off.
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
            return Review(self.technique, price, gain, True)
        if prospect() >= price:
            return None
        pause, self.pause_left = self.pause, self.pause
        self.pause = min(2 * self.pause, MOST_PAUSE)
        return Review(self.technique, price, gain, False, pause)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {name: getattr(self, name) for name in self._FIELDS}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        where = f"state.{self.technique}"
        require_keys(where, state, self._FIELDS)
        for name, value in state.items():
            check = checks.integer if name in self._COUNTS else checks.number
            check(f"{where}.{name}", value, low=0)

        def load() -> None:
            for name, value in state.items():
                setattr(self, name, value)

        return load
