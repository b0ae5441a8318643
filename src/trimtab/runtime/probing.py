"""Windows that are made to show what those of the present k do not: the noise, or the time of a loader batch."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import FormatError
from trimtab.decide.accounts import Account
from trimtab.decide.accumulation import Noise, is_known_well, most
from trimtab.decide.window_times import WindowTimes

# Windows, of a run or after a pause, in which they are as dense as the account allows while nothing is known, if they
# are split; larger ones, whose price in samples is on no account, are one in so many after the first few. And from then
# on, or where all is known, one window in so many.
_EXPLORED, _FIRST, _LARGER, _SPARSE = 200, 30, 4, 50
_RENEWED = 200  # windows after which the time of a loader batch is looked at again
# Loader batches of a window that shows the time of one: its first adds gradients to none, its last has the reduction.
_TIMED = 3


class Probing:
    """Decides which windows are of more loader batches than decided, or of one that is split in two.

    Args:
        unit: micro-batches of a loader batch. account, times: of the run, as they are each time. may_split: whether a
            batch may be split. shows_one: whether a window of one micro-batch shows the noise, as
            on several ranks, or nobody asks for it.

    Attributes:
        fits: whether memory is enough for such windows, as far as is known.
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
        self.fits = True

    def state_dict(self) -> dict[str, bool]:
        """Return what a resumed run needs."""
        return {"fits": self.fits}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Continue from `state_dict()`; raises `FormatError` where it is none."""
        if not isinstance(state, Mapping) or not isinstance(state.get("fits"), bool):
            raise FormatError("state.probing", given=f"{state!r:.80}", expected="fits, true or false")
        self.fits = state["fits"]

    def batches(self, decided: int, k: int, noise: Noise | None) -> int:
        """Return the loader batches of the next window: as decided, or as many as show what those do not."""
        if not self.is_due(k, noise):
            return decided
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
        if not (lacks_times or lacks_noise):
            return self._renews_times(k)
        is_known = is_known_well(self._rule, noise) and not lacks_times
        explores = not is_known and self._account.windows - self._account.began < _EXPLORED
        if not explores:
            return self._account.is_due(sparse=_SPARSE)
        are_larger = lacks_times or not self._may_split
        is_early = self._account.windows - self._account.began < _FIRST
        return self._account.is_due(sparse=_LARGER if are_larger and not is_early else 0)

    def _lacks_times(self, k: int) -> bool:
        """Return whether only a window of more loader batches shows the time of one.

        Half of one may take more than half of it.
        """
        return self._hides_times(k) and not self._times.is_known

    def _renews_times(self, k: int) -> bool:
        """Return whether what is known is looked at again: it may be of a moment in which the machine was busy."""
        return self._hides_times(k) and self._times.is_known and self._account.is_due(sparse=_RENEWED)

    def _hides_times(self, k: int) -> bool:
        are_few = k < self.timed * self._unit
        return self._rule.policy == "goodput" and self._may_double and are_few
