"""k of a run by its rule: takes in what measured windows say, decides, and reviews whether measuring pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from trimtab.core import checks
from trimtab.core.batch_rule import BatchRule
from trimtab.core.state_parts import Load, Part, loading_parts, require_keys
from trimtab.decide.accounts import PATIENCE, Account
from trimtab.decide.accumulation import Noise, Standing, decide, gain, most
from trimtab.decide.noise import NoiseAverage, WindowNoise
from trimtab.decide.window_times import WindowTimes

Note = Callable[[str, Mapping[str, Any]], None]


class BatchDecider(Part):
    """k while training, from figures that are the same on every rank.

    Args:
        unit: micro-batches of a loader batch. micro_rows: rows of one. normalises: as of `Standing`.
        note: called with an event's name and figures.

    Attributes:
        k: micro-batches per window and rank, a multiple of the unit; by "throughput_per_memory" those that a loader
            batch is cut into.
    """

    def __init__(
        self, rule: BatchRule, unit: int, micro_rows: float, num_ranks: int, note: Note, *, normalises: bool
    ) -> None:
        self._rule, self._unit, self._note = rule, unit, note
        self.k = self._base_k = min(-(-rule.k // unit) * unit, most(rule, unit))
        self._cuts = rule.policy == "throughput_per_memory"
        self._first = Standing(self.k, unit, micro_rows, num_ranks, normalises=normalises)
        self._average, self.times = NoiseAverage(), WindowTimes()
        self.account = Account("noise monitor")
        self._absorbed_at = 0
        self._pays: bool | None = None
        self._last_gain: float | None = None
        if self._cuts:  # it is given all it needs
            self.decide()

    @property
    def noise(self) -> Noise | None:
        """What the windows so far say."""
        return self._average.noise

    @property
    def num_batches(self) -> int:
        """Loader batches of a window, as decided."""
        return 1 if self._cuts else -(-self.k // self._unit)

    @property
    def standing(self) -> Standing:
        """What is decided upon."""
        return replace(self._first, k=self.k, noise=self.noise, times=self.times.times(self._first.micro_rows))

    def absorb(self, window: WindowNoise | None, seconds: Sequence[Sequence[float]]) -> None:
        """Take in what a measured window said.

        Args:
            seconds: of each rank those of a row, of the window's fixed part, of the whole of it, and of measuring; nan
                where the window did not show them.
        """
        row_s, fixed_s, window_s, spent_s = zip(*seconds, strict=True)
        if window is not None:
            self._average.add(window, age=self.account.windows - self._absorbed_at)
            self._absorbed_at = self.account.windows
        elif self.account.uses == PATIENCE and self.noise is None:
            self._note("noise", {"known": False, "reason": f"{PATIENCE} windows that were measured said nothing"})
        if not math.isnan(sum(row_s)):  # a rank that waits for another takes it for a fixed part of its window
            self.times.add(max(row_s), min(fixed_s))
        if told := [both for both in zip(window_s, spent_s, strict=True) if not math.isnan(both[0])]:
            self.account.charge(max(window for window, _ in told), max(spent for _, spent in told))

    def decide(self) -> None:
        """Let the rule choose k; a change is noted with the figures behind it."""
        standing = self.standing
        decision = decide(self._rule, standing)
        if decision.k == self.k:
            return
        figures = {"from": self.k, "to": decision.k, "wanted": decision.wanted, "reason": decision.reason}
        known = asdict(standing.noise) if standing.noise else {}
        known |= asdict(standing.times) if standing.times else {}
        self._note("k", figures | known)
        self.k = decision.k

    def repeat(self, k: int) -> None:
        """Take what was decided before the run was cut off."""
        if k != self.k:
            self._note("k", {"from": self.k, "to": k, "wanted": None, "reason": "as decided before it was cut off"})
            self.k = k

    def hold(self, reason: str) -> None:
        """Note why k stays though nothing was decided."""
        self._note("k", {"from": self.k, "to": self.k, "wanted": None, "reason": f"held for now: {reason}"})

    def review(self) -> None:
        """Pause measuring where it takes more than the best k would bring."""
        if self._rule.policy != "goodput":
            return
        review = self.account.review(self._gain(), self._prospect)
        if review is not None and review.pays != self._pays:
            self._pays = review.pays
            self._note("account", asdict(review))
        if review is not None and not review.pays:
            self._average, self._pays = NoiseAverage(), None  # by the end of the pause it says nothing any more
            self.times.forget()

    def _prospect(self) -> float:
        """Return what the best k may come to save by the end of a pause: noise grows, at the most as a run does."""
        standing, account = self.standing, self.account
        if standing.noise is None or not account.windows:
            return 0.0
        growth = 1 + account.pause / account.windows
        return gain(self._rule, replace(standing, noise=standing.noise.grown(growth)), self._base_k) or 0.0

    def _gain(self) -> float | None:
        found = gain(self._rule, self.standing, self._base_k)
        self._last_gain = self._last_gain if found is None else found
        return found

    def summary(self) -> dict[str, Any] | None:
        """Return what measuring took, as a share of the windows' time, and what it could bring; None if nothing was."""
        account = self.account
        if not account.uses:
            return None
        self._gain()
        figures = {"technique": account.technique, "price": account.share, "gain": self._last_gain}
        return figures | {"windows": account.windows, "measured": account.uses}

    def state_dict(self) -> dict[str, Any]:
        """Return a window's loader batches, averages, times and the account."""
        batches = {"batches": self.num_batches, "base_batches": self._base_k // self._unit}
        return batches | {name: part.state_dict() for name, part in self._parts().items()}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        names = "batches", "base_batches"
        require_keys("state.batch.decided", state, (*names, *self._parts()))
        batches, base = (checks.integer(f"state.batch.decided.{name}", state[name]) for name in names)
        load_parts = loading_parts(self._parts(), {name: state[name] for name in self._parts()})

        def load() -> None:
            load_parts()
            self._absorbed_at = self.account.windows
            if not self._cuts:
                self._continue_with(batches, base)

        return load

    def _continue_with(self, batches: int, base: int) -> None:
        """Take as many loader batches as there were, or as `k_max` allows, whose micro-batches may be smaller now."""
        self.k, self._base_k = (min(n * self._unit, most(self._rule, self._unit)) for n in (batches, base))
        if self.num_batches != batches:
            why = f"k_max = {self._rule.k_max} allows {self.num_batches} of the {batches} loader batches there were"
            self._note("k", {"from": batches * self._unit, "to": self.k, "wanted": None, "reason": why})

    def _parts(self) -> dict[str, Any]:
        return {"noise": self._average, "times": self.times, "account": self.account}
