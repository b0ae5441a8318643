"""Probe steps: steps with more or split loader batches, to measure gradient noise or the time of a loader batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trimtab.core import validation
from trimtab.core.batch_rule import BatchRule
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.decide.batch_size_policy import NoiseEstimate, PolicyInput, could_save, is_known_well, largest_k
from trimtab.decide.overhead_budget import OverheadBudget
from trimtab.decide.step_time_model import WindowTimes

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
        rule: policy and bounds.
        unit: micro-batches per loader batch.
        account: overhead account of the run.
        times: time estimates of the run.
        may_split: a loader batch may be split.
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
        """Validate `state_dict()` and return a function that loads it, possibly on a machine with more memory.

        Raises:
            FormatError, ValueGivenError: the state is invalid.
        """
        require_keys("state.probing", state, self.state_dict())
        explored, at = (validation.integer(f"state.probing.{name}", state[name], low=0) for name in self.state_dict())

        def load() -> None:
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
        """Record an exploring step, and compute the time of the next.

        Args:
            asked: loader batches of the exploring step.
            decided: chosen number of loader batches.
        """
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
