"""k while training: what measured windows say, what a rule makes of it, and the learning rate that follows.

A window may be measured (noise and times); its figures are read a window later, shared between ranks in the next, and
decided upon then: always from figures that are the same on every rank. Windows that are not measured cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core import checks
from trimtab.core.errors import FormatError
from trimtab.core.plan import Plan
from trimtab.decide.accounts import Account
from trimtab.decide.accumulation import Noise, Standing, decide, most, relative_time
from trimtab.decide.noise import NoiseAverage
from trimtab.decide.window_times import WindowTimes
from trimtab.measure.late import Late
from trimtab.measure.window_clock import Stamped, WindowClock
from trimtab.runtime.accumulation import Count
from trimtab.runtime.exchange import Exchange
from trimtab.runtime.noise_monitor import NoiseMonitor, NoiseSums
from trimtab.runtime.schedule import RateFollower

Note = Callable[[str, Mapping[str, Any]], None]
_SUMS = 6  # figures of NoiseSums, before those of time


@dataclass(frozen=True)
class _Measured:
    """A window whose figures are on their way. `rows` of its micro-batches; `spent_s` on measuring it."""

    sums: Late
    stamps: Stamped
    rows: tuple[int, ...]
    spent_s: float

    def figures(self) -> list[float]:
        """Return sums, then seconds a row before the last micro-batch, fixed, whole, and spent; nan where unknown."""
        seconds, before = self.stamps.read(), sum(self.rows[:-1])
        row_s = sum(seconds.micro_s) / before if before else math.nan
        fixed_s = seconds.window_s - row_s * sum(self.rows)
        return [*self.sums.read(), row_s, fixed_s, seconds.window_s, self.spent_s]


class BatchControl:
    """The batch of a run whose plan freed it.

    Args:
        plan: has a batch rule. note: called with an event's name and figures.

    Attributes:
        k: micro-batches per window and rank, a multiple of a loader batch's own.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, exchange: Exchange, note: Note) -> None:
        assert plan.batch_rule is not None
        self._rule, self._exchange, self._note = plan.batch_rule, exchange, note
        self._unit = plan.num_micro_batches
        self._micro_rows = plan.batch_rows / self._unit
        self._may_split = plan.check is None or plan.check.splittable
        self.k = min(-(-self._rule.k // self._unit) * self._unit, most(self._rule, self._unit))
        self._base_k = self.k
        self._average, self._times = NoiseAverage(), WindowTimes()
        self._account = Account("noise monitor")
        self._follower = RateFollower.for_optimizer(self._rule.learning_rate, optimizer)
        self._monitor = NoiseMonitor(model.parameters())
        self._clock = WindowClock(next(model.parameters()).device)
        self._measured: _Measured | None = None
        self._sums: Late | None = None
        self._rows: list[int] = []

    # What a window is made of.

    @property
    def noise(self) -> Noise | None:
        """What the windows so far say."""
        return self._average.noise

    @property
    def num_batches(self) -> int:
        """Loader batches of the next window. One that is measured has two micro-batches at the least, to tell times."""
        probes = self._rule.policy != "fixed" and self._is_due and most(self._rule, self._unit) > 1
        return -(-(max(self.k, 2) if probes else self.k) // self._unit)

    def micro_batch_of(self, rows: int, planned: int, num_batches: int) -> int:
        """Return rows per micro-batch: a window of one, in a run whose k is fixed, is split in two to be measured."""
        alone = num_batches * -(-rows // planned) == 1 and self._exchange.num_ranks == 1
        split = alone and self._is_due and self._rule.policy == "fixed" and self._may_split and rows > 1
        return -(-rows // 2) if split else planned

    def rate_factor(self, num_batches: int) -> float:
        """Return the factor on the learning rate for a window of so many loader batches, the next to be applied."""
        return self._follower.factor(num_batches)

    @property
    def _is_due(self) -> bool:
        return self._account.is_due(free=self._rule.min_windows)

    # What happens in it.

    def opened(self, num_micro_batches: int) -> None:
        """A window's first micro-batch is about to be handed out."""
        self._rows.clear()
        if self._is_due and num_micro_batches * self._exchange.num_ranks > 1:
            self._monitor.open()

    def begun(self, rows: int) -> None:
        """A micro-batch is about to be handed out."""
        if self._monitor.is_on:
            self._rows.append(rows)
            self._clock.begin()

    def backward_done(self, rows: int, terms: Count) -> None:
        """A micro-batch had its backward."""
        if self._monitor.is_on:
            self._monitor.backward_done(rows, terms)

    @property
    def wants_norm(self) -> bool:
        """Whether the norm of the window's gradient is needed."""
        return self._monitor.is_on

    def stepping(self, norm: Tensor, divisor: float | Tensor, scale: float) -> None:
        """The window's gradient is whole; arguments as in `NoiseMonitor.close`."""
        if self._monitor.is_on:
            self._sums = self._monitor.close(norm, divisor, scale)

    def stepped(self, *, applied: bool) -> None:
        """The window is over; void, it says nothing. What an earlier one said has arrived."""
        shared = self._exchange.take()
        if shared is not None:
            self._absorb(shared)
        if self._measured is not None:
            self._exchange.put(self._measured.figures())
        self._measured = None
        if self._sums is not None and applied:
            self._measured = _Measured(self._sums, self._clock.end(), tuple(self._rows), self._monitor.spent_s)
        self.dropped()
        self._account.pass_window()

    def dropped(self) -> None:
        """The window was given up, or is over."""
        self._monitor.drop()
        self._clock.drop()
        self._sums = None

    # What it is taken for.

    def _absorb(self, shared: list[list[float]]) -> None:
        """Take the figures of all ranks in, and decide."""
        window = NoiseSums.of_ranks([figures[:_SUMS] for figures in shared]).noise()
        row_s, fixed_s, window_s, spent_s = zip(*(figures[_SUMS:] for figures in shared), strict=True)
        if window is not None:
            self._average.add(window)
        if not math.isnan(sum(row_s)):  # a rank that waits for another takes it for a fixed part of its window
            self._times.add(max(row_s), min(fixed_s))
        self._account.charge(max(window_s), max(spent_s))
        self._decide()
        self._review()

    def _standing(self) -> Standing:
        times = self._times.times(self._micro_rows)
        return Standing(self.k, self._unit, self._micro_rows, self._exchange.num_ranks, self.noise, times)

    def _decide(self) -> None:
        standing = self._standing()
        decision = decide(self._rule, standing)
        if decision.k == self.k:
            return
        figures = {"from": self.k, "to": decision.k, "wanted": decision.wanted, "reason": decision.reason}
        known = asdict(standing.noise) if standing.noise else {}
        known |= asdict(standing.times) if standing.times else {}
        self._note("k", figures | known)
        self.k = decision.k

    def _review(self) -> None:
        review = self._account.review(self._gain())
        if review is not None and not review.pays:
            self._note("paused", asdict(review))

    def _gain(self) -> float | None:
        """Return the share of time to a loss that the best k would save of the first one's; None while unknown."""
        standing = self._standing()
        noise, times = standing.noise, standing.times
        if self._rule.policy != "goodput" or noise is None or times is None or not noise.norm2 > 0:
            return None

        def cost(k: int) -> float:
            return relative_time(k, noise.scale, self._micro_rows, self._exchange.num_ranks, times)

        best = min(map(cost, range(self._unit, most(self._rule, self._unit) + 1, self._unit)))
        return 1 - best / cost(self._base_k)

    # What a resumed run needs.

    def state_dict(self) -> dict[str, Any]:
        """Return k, averages, times, the account and the rate that follows; figures on their way are not in it."""
        return {"k": self.k, "base_k": self._base_k} | {name: part.state_dict() for name, part in self._parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            FormatError, ValueGivenError: not such a state; nothing was changed.
        """
        expected = {"k", "base_k", *(name for name, _ in self._parts())}
        if not isinstance(state, Mapping) or set(state) != expected:
            raise FormatError("state.batch", given=f"{state!r:.80}", expected="the keys " + ", ".join(sorted(expected)))
        k, base_k = (self._checked_k(f"state.batch.{name}", state[name]) for name in ("k", "base_k"))
        before = self.state_dict()
        try:
            for name, part in self._parts():
                part.load_state_dict(state[name])
        except BaseException:
            for name, part in self._parts():
                part.load_state_dict(before[name])
            raise
        self.k, self._base_k = k, base_k

    def _checked_k(self, field: str, value: Any) -> int:
        k = checks.integer(field, value, high=most(self._rule, self._unit))
        if k % self._unit:
            raise FormatError(field, given=str(k), expected=f"a multiple of {self._unit}, the micro-batches of a batch")
        return k

    def _parts(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("noise", self._average),
            ("times", self._times),
            ("account", self._account),
            ("rate", self._follower),
        )
