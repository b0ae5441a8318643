"""Overhead budget of run-time techniques, and probe steps: larger or split steps that measure noise or batch times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate, PolicyInput, could_save, is_known_well, largest_k
from trimtab.adaptive_batch.step_time_model import WindowTimes
from trimtab.core import validation
from trimtab.core.batch_rule import BatchRule
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

        With `sparse`, only every `sparse`-th step; otherwise at a minimum distance from the last use.
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
        """Record the cost of a use."""
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
        where = f"state.{self.technique}"
        require_keys(where, state, self._FIELDS)
        for name, value in state.items():
            check = validation.integer if name in self._COUNTS else validation.number
            check(f"{where}.{name}", value, low=0)

        def load() -> None:
            for name, value in state.items():
                setattr(self, name, value)

        return load


# Frequency of probe steps while estimates are missing: for the first _EXPLORED steps of a run or after a pause, split
# batches are as frequent as the overhead account allows. Larger steps, whose cost in samples is on no account, are so
# for _FIRST steps, then every _LARGER-th step. Later, or with complete estimates, every _SPARSE-th step.
_EXPLORED, _FIRST, _LARGER, _SPARSE = 200, 30, 4, 50
_RENEWED = 200  # steps between two measurements of a loader batch's time
# Without per-micro-batch gradients, the information of a step grows with the square of its batches. While the noise is
# unknown and a better k could save _WORTH_EXPLORING, steps of 4, 8, ... batches are made. Their additional batches take
# the fraction _EXPLORING of that saving: at the learning rate of the chosen k they contribute almost nothing.
_WORTH_EXPLORING, _EXPLORING = 0.02, 1 / 8
_FIRST_EXPLORED = 4
_UNFIT = 1_000  # steps without probe steps after an out-of-memory error in one
# Loader batches of a step that measures a batch's time: the first creates gradients, the last includes the reduction.
_TIMED = 3


class ProbeSelection(Stateful):
    """Selects probe steps: steps with more loader batches than chosen, or with a single batch split in two.

    Args:
        unit: micro-batches per loader batch.
        shows_one: a step of a single micro-batch shows the noise (several ranks), or the noise is not needed.

    Attributes:
        timed: loader batches of a step that measures a batch's time. The time is that of the batches between first and
            last, or of the first if only two are allowed.
    """

    def __init__(
        self,
        rule: BatchRule,
        unit: int,
        account: OverheadBudget,
        times: WindowTimes,
        *,
        may_split: bool,
        shows_one: bool,
    ) -> None:
        self._rule, self._unit, self._account, self._times = rule, unit, account, times
        self._may_split, self._shows_one = may_split, shows_one
        self._may_double = rule.policy != "fixed" and largest_k(rule, unit) > unit
        self.timed = max(2, min(_TIMED, largest_k(rule, unit) // unit))
        self._fits_from, self._unfit = 0, _UNFIT
        # loader batches of the last exploring step; step from which another is allowed
        self._explored = self._explores_at = 0
        self._could_save = 0.0  # fraction of time saved by the best k at the largest plausible noise

    def state_dict(self) -> dict[str, Any]:
        """Return the exploration state for a resumed run."""
        return {"explored": self._explored, "explores_at": self._explores_at}

    def loading(self, state: Mapping[str, Any]) -> Load:
        require_keys("state.probing", state, self.state_dict())
        explored, at = (validation.integer(f"state.probing.{name}", state[name], low=0) for name in self.state_dict())

        def load() -> None:  # Possibly on a machine with more memory.
            self._explored, self._explores_at = explored, at
            self._fits_from, self._unfit = 0, _UNFIT

        return load

    def told(self, standing: PolicyInput) -> None:
        """Update the possible saving after a change of the estimates or of k."""
        self._could_save = could_save(self._rule, standing)

    @property
    def fits(self) -> bool:
        """True unless probe steps are suspended after an out-of-memory error."""
        return self._account.windows >= self._fits_from

    def ran_out(self) -> None:
        """Suspend probe steps after an out-of-memory error, for twice as long every time."""
        self._fits_from = self._account.windows + self._unfit
        self._unfit *= 2

    def batches(self, decided: int, k: int, noise: NoiseEstimate | None) -> int:
        """Return the loader batches of the next step: the chosen number, or that of a probe step."""
        if not self.is_due(k, noise):
            return decided
        if self.explores(k, noise):
            return self._many(k)
        if self._lacks_times(k) or self._renews_times(k):
            return self.timed
        return 2 if self._may_double and not self._may_split else decided

    def splits(self, k: int, noise: NoiseEstimate | None) -> bool:
        """Return True if the single micro-batch of the next step is to be split in two."""
        return self._may_split and self.is_due(k, noise)

    def is_due(self, k: int, noise: NoiseEstimate | None) -> bool:
        """Return True if the next step is a probe step."""
        lacks_times, lacks_noise = self._lacks_times(k), k == 1 and not self._shows_one
        if not self.fits:
            return False
        if self.explores(k, noise):
            return True
        if not (lacks_times or lacks_noise):
            return self._renews_times(k)
        is_known = is_known_well(self._rule, noise) and not lacks_times
        explores = not is_known and self._account.windows - self._account.began < _EXPLORED
        if not explores:
            return self._account.is_due(sparse=_SPARSE)
        are_larger = lacks_times or not self._may_split
        is_early = self._account.windows - self._account.began < _FIRST
        return self._account.is_due(sparse=_LARGER if are_larger and not is_early else 0)

    def explored(self, asked: int, decided: int) -> None:
        """Record an exploring step, and compute the time of the next."""
        self._explored = asked
        wait = (asked / decided - 1) / (_EXPLORING * max(self._could_save, _WORTH_EXPLORING))
        self._explores_at = self._account.windows + math.ceil(wait)

    def explores(self, k: int, noise: NoiseEstimate | None) -> bool:
        """Return True if the next step takes many batches, to measure noise that the chosen number does not show."""
        if self._shows_one or not self._may_double or self._account.is_paused or not self._times.is_known:
            return False
        if self._many(k) < max(2 * (k // self._unit), self.timed + 1):
            return False
        is_worth_it = self._could_save >= _WORTH_EXPLORING and not is_known_well(self._rule, noise)
        return is_worth_it and self._account.windows >= self._explores_at

    def _many(self, k: int) -> int:
        """Return the loader batches of the next exploring step: twice those of the last, up to `k_max`."""
        wanted = max(2 * self._explored, 2 * (k // self._unit), _FIRST_EXPLORED)
        return min(largest_k(self._rule, self._unit) // self._unit, wanted)

    def _lacks_times(self, k: int) -> bool:
        """Return True if only a step of more loader batches can show the time of a batch.

        Half a loader batch may take more than half its time, so splitting is no substitute.
        """
        return self._hides_times(k) and not self._times.is_own

    def _renews_times(self, k: int) -> bool:
        """Return True if known times are to be measured again, because the machine may have been busy."""
        return self._hides_times(k) and self._times.is_known and self._account.is_due(sparse=_RENEWED)

    def _hides_times(self, k: int) -> bool:
        are_few = k < self.timed * self._unit
        return self._rule.policy == "goodput" and self._may_double and are_few
