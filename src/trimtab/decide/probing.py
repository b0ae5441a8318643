"""Windows that are made to show what those of the present k do not: the noise, or the time of a loader batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trimtab.core import checks
from trimtab.core.batch_rule import BatchRule
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.decide.accounts import Account
from trimtab.decide.accumulation import Noise, Standing, could_save, is_known_well, most
from trimtab.decide.window_times import WindowTimes

# Windows, of a run or after a pause, in which they are as dense as the account allows while nothing is known, if they
# are split; larger ones, whose price in samples is on no account, are one in so many after the first few. And from then
# on, or where all is known, one window in so many.
_EXPLORED, _FIRST, _LARGER, _SPARSE = 200, 30, 4, 50
_RENEWED = 200  # windows after which the time of a loader batch is looked at again
# Where micro-batches are not seen apart, what a window says of the noise grows as the square of its batches. While
# it is not known, and k could save so much, windows of four batches, eight, and so on are made, whose further batches
# take this share of that: at the rate of what is decided they bring next to nothing.
_WORTH_EXPLORING, _EXPLORING = 0.02, 1 / 8
_FIRST_EXPLORED = 4
_UNFIT = 1_000  # windows for which none is made after memory ran out in one
# Loader batches of a window that shows the time of one: its first adds gradients to none, its last has the reduction.
_TIMED = 3


class Probing(Part):
    """Decides which windows are of more loader batches than decided, or of one that is split in two.

    Args:
        unit: micro-batches of a loader batch. account, times: of the run, as they are each time. may_split: whether a
            batch may be split. shows_one: whether a window of one micro-batch shows the noise, as
            on several ranks, or nobody asks for it.

    Attributes:
        timed: loader batches of a window that shows the time of one, which is that of those between first and last; of
            two where no more are allowed, the first's.
    """

    def __init__(
        self, rule: BatchRule, unit: int, account: Account, times: WindowTimes, *, may_split: bool, shows_one: bool
    ) -> None:
        self._rule, self._unit, self._account, self._times = rule, unit, account, times
        self._may_split, self._shows_one = may_split, shows_one
        self._may_double = rule.policy != "fixed" and most(rule, unit) > unit
        self.timed = max(2, min(_TIMED, most(rule, unit) // unit))
        self._fits_from, self._unfit = 0, _UNFIT
        self._explored = self._explores_at = 0  # loader batches of the last window of many; when there may be another
        self._could_save = 0.0  # by the best k, if the noise is the most there can be

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"explored": self._explored, "explores_at": self._explores_at}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`, on a machine that may have more memory than the one it was.

        Raises:
            FormatError, ValueGivenError: not such a state.
        """
        require_keys("state.probing", state, self.state_dict())
        explored, at = (checks.integer(f"state.probing.{name}", state[name], low=0) for name in self.state_dict())

        def load() -> None:
            self._explored, self._explores_at = explored, at
            self._fits_from, self._unfit = 0, _UNFIT

        return load

    def told(self, standing: Standing) -> None:
        """What is known, or k, has changed."""
        self._could_save = could_save(self._rule, standing)

    @property
    def fits(self) -> bool:
        """Whether memory is enough for such windows, as far as is known."""
        return self._account.windows >= self._fits_from

    def ran_out(self) -> None:
        """It was not; such windows are tried again after a while, which is longer each time."""
        self._fits_from = self._account.windows + self._unfit
        self._unfit *= 2

    def batches(self, decided: int, k: int, noise: Noise | None) -> int:
        """Return the loader batches of the next window: as decided, or as many as show what those do not."""
        if not self.is_due(k, noise):
            return decided
        if self.explores(k, noise):
            return self._many(k)
        if self._lacks_times(k) or self._renews_times(k):
            return self.timed
        return 2 if self._may_double and not self._may_split else decided

    def splits(self, k: int, noise: Noise | None) -> bool:
        """Return whether the next window, of one micro-batch, is split in two."""
        return self._may_split and self.is_due(k, noise)

    def is_due(self, k: int, noise: Noise | None) -> bool:
        """Return whether the next window is to show what one as decided does not."""
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
        """A window that was to be of so many batches is over, where so many are decided."""
        self._explored = asked
        wait = (asked / decided - 1) / (_EXPLORING * max(self._could_save, _WORTH_EXPLORING))
        self._explores_at = self._account.windows + math.ceil(wait)

    def explores(self, k: int, noise: Noise | None) -> bool:
        """Return whether the next window is of many batches, to find noise that those decided do not show."""
        if self._shows_one or not self._may_double or self._account.is_paused or not self._times.is_known:
            return False
        if self._many(k) < max(2 * (k // self._unit), self.timed + 1):
            return False
        is_worth_it = self._could_save >= _WORTH_EXPLORING and not is_known_well(self._rule, noise)
        return is_worth_it and self._account.windows >= self._explores_at

    def _many(self, k: int) -> int:
        """Return the loader batches of the next window of many: twice the last one's, if `k_max` allows."""
        wanted = max(2 * self._explored, 2 * (k // self._unit), _FIRST_EXPLORED)
        return min(most(self._rule, self._unit) // self._unit, wanted)

    def _lacks_times(self, k: int) -> bool:
        """Return whether only a window of more loader batches shows the time of one.

        Half of one may take more than half of it.
        """
        return self._hides_times(k) and not self._times.is_own

    def _renews_times(self, k: int) -> bool:
        """Return whether what is known is looked at again: it may be of a moment in which the machine was busy."""
        return self._hides_times(k) and self._times.is_known and self._account.is_due(sparse=_RENEWED)

    def _hides_times(self, k: int) -> bool:
        are_few = k < self.timed * self._unit
        return self._rule.policy == "goodput" and self._may_double and are_few
