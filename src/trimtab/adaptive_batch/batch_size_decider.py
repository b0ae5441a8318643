"""Adaptive accumulation during a run: updates estimates from measured steps, chooses k, and reviews the overhead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate, PolicyInput, decide, gain, largest_k
from trimtab.adaptive_batch.gradient_noise_scale import NoiseAverage, WindowNoise
from trimtab.adaptive_batch.noise_probes import PATIENCE, OverheadBudget
from trimtab.adaptive_batch.step_time_model import WindowTimes
from trimtab.core import validation
from trimtab.core.batch_rule import BatchRule
from trimtab.core.stateful import Load, Stateful, loading_parts, require_keys

Note = Callable[[str, Mapping[str, Any]], None]


class BatchSizeDecider(Stateful):
    """Chooses the number of micro-batches k while training, from figures that are equal on all ranks.

    Args:
        unit: micro-batches per loader batch.
        note: called with an event's name and figures.

    Attributes:
        k: micro-batches per step and rank, a multiple of `unit`. With "throughput_per_memory": number of micro-batches
            that a loader batch is split into.
    """

    def __init__(
        self, rule: BatchRule, unit: int, micro_batch_samples: float, num_ranks: int, note: Note, *, normalises: bool
    ) -> None:
        self._rule, self._unit, self._note = rule, unit, note
        self.k = self._base_k = min(-(-rule.k // unit) * unit, largest_k(rule, unit))
        self._cuts = rule.policy == "throughput_per_memory"
        self._first = PolicyInput(self.k, unit, micro_batch_samples, num_ranks, normalises=normalises)
        self._average, self.times = NoiseAverage(), WindowTimes()
        self.account = OverheadBudget("noise monitor")
        self._absorbed_at = 0
        self._pays: bool | None = None
        self._last_gain: float | None = None
        if self._cuts:  # The rule already contains the trials, so the choice is made at once.
            self.decide()

    @property
    def noise(self) -> NoiseEstimate | None:
        """Noise estimate from the steps so far; None before the first."""
        return self._average.noise

    @property
    def num_batches(self) -> int:
        """Loader batches per step."""
        return 1 if self._cuts else -(-self.k // self._unit)

    @property
    def standing(self) -> PolicyInput:
        """Current input of the decision."""
        return replace(self._first, k=self.k, noise=self.noise, times=self.times.times(self._first.micro_batch_samples))

    def absorb(self, window: WindowNoise | None, seconds: Sequence[Sequence[float]]) -> None:
        """Update the estimates from a measured step.

        Args:
            window: noise estimates of the step; None if unknown.
            seconds: per rank, the seconds of a sample, of the step's fixed part, of the whole step and of measuring;
                NaN if unknown.
        """
        sample_s, fixed_s, window_s, spent_s = zip(*seconds, strict=True)
        if window is not None:
            self._average.add(window, age=self.account.windows - self._absorbed_at)
            self._absorbed_at = self.account.windows
        elif self.account.uses == PATIENCE and self.noise is None:
            reason = f"the noise scale is unknown after {PATIENCE} measured steps"
            self._note("noise", {"known": False, "code": "noise.unknown", "reason": reason})
        if not math.isnan(sum(sample_s)):  # A rank that waits for another includes the wait in its fixed part.
            self.times.add(max(sample_s), min(fixed_s))
        if told := [both for both in zip(window_s, spent_s, strict=True) if not math.isnan(both[0])]:
            self.account.charge(max(window for window, _ in told), max(spent for _, spent in told))

    def decide(self) -> None:
        """Choose the number of micro-batches per step by the plan's batch rule, and log a change with its figures."""
        standing = self.standing
        decision = decide(self._rule, standing)
        if decision.k == self.k:
            return
        known = asdict(standing.noise) if standing.noise else {}
        known |= asdict(standing.times) if standing.times else {}
        self._note_k(decision.k, decision.code, decision.reason, wanted=decision.wanted, **known)
        self.k = decision.k

    def repeat(self, k: int) -> None:
        """Set the k that was decided before the run was interrupted."""
        if k != self.k:
            self._note_k(k, "k.resumed", "decided before the run was interrupted")
            self.k = k

    def hold(self, reason: str) -> None:
        """Log the reason why k stays without a decision."""
        self._note_k(self.k, "k.held", f"unchanged: {reason}")

    def _note_k(self, k: int, code: str, reason: str, *, before: int | None = None, **more: Any) -> None:
        self._note("k", {"from": before or self.k, "to": k, "wanted": None, "code": code, "reason": reason} | more)

    def review(self) -> None:
        """Pause measuring if it costs more than the best k would save."""
        if self._rule.policy != "goodput":
            return
        review = self.account.review(self._gain(), self._prospect)
        if review is not None and review.pays != self._pays:
            self._pays = review.pays
            self._note("account", asdict(review))
        if review is not None and not review.pays:
            self._average, self._pays = NoiseAverage(), None  # out of date by the end of the pause
            self.times.forget()

    def _prospect(self) -> float:
        """Return the saving of the best k by the end of a pause: noise grows at most with the length of the run."""
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
        """Return the overhead as a fraction of the step time and the possible saving; None if nothing was measured."""
        account = self.account
        if not account.uses:
            return None
        self._gain()
        figures = {"technique": account.technique, "price": account.share, "gain": self._last_gain}
        return figures | {"windows": account.windows, "measured": account.uses}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of loader batches per step, the averages, the times and the overhead account."""
        batches = {"batches": self.num_batches, "base_batches": self._base_k // self._unit}
        return batches | {name: part.state_dict() for name, part in self._parts().items()}

    def loading(self, state: Mapping[str, Any]) -> Load:
        names = "batches", "base_batches"
        require_keys("state.batch.decided", state, (*names, *self._parts()))
        batches, base = (validation.integer(f"state.batch.decided.{name}", state[name]) for name in names)
        load_parts = loading_parts(self._parts(), {name: state[name] for name in self._parts()})

        def load() -> None:
            load_parts()
            self._absorbed_at = self.account.windows
            if not self._cuts:
                self._continue_with(batches, base)

        return load

    def _continue_with(self, batches: int, base: int) -> None:
        """Resume with the number of loader batches per step from a checkpoint, limited by `k_max`.

        If this run splits loader batches into smaller micro-batches than the saved run, `k_max` may allow fewer.
        """
        self.k, self._base_k = (min(n * self._unit, largest_k(self._rule, self._unit)) for n in (batches, base))
        if self.num_batches != batches:
            why = (
                f"k_max={self._rule.k_max} allows {self.num_batches} of the {batches} loader batches of the checkpoint"
            )
            self._note_k(self.k, "k.limited", why, before=batches * self._unit)

    def _parts(self) -> dict[str, Any]:
        return {"noise": self._average, "times": self.times, "account": self.account}
