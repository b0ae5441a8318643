"""k while training: what measured windows say, what a rule makes of it, and the learning rate that follows.

A window may be measured (noise and times); its figures are read a window later, shared between ranks in the next, and
decided upon then: always from figures that are the same on every rank. Windows that are not measured cost nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core import checks
from trimtab.core.errors import FormatError
from trimtab.core.plan import Plan
from trimtab.decide.accounts import Account
from trimtab.decide.accumulation import Noise, Standing, decide, gain, is_known_well, most
from trimtab.decide.noise import NoiseAverage
from trimtab.decide.window_times import WindowTimes
from trimtab.measure.late import Late
from trimtab.measure.spent import Spent
from trimtab.measure.window_clock import Stamped, WindowClock
from trimtab.runtime.accumulation import Count, WindowWeights
from trimtab.runtime.exchange import Exchange
from trimtab.runtime.fixed_batch import FixedBatch
from trimtab.runtime.noise_monitor import NUM_FIGURES, NoiseMonitor
from trimtab.runtime.run_state import load_parts
from trimtab.runtime.schedule import RateFollower
from trimtab.runtime.splitting import keeps_maths

Note = Callable[[str, Mapping[str, Any]], None]
# Where windows of the present k show too little, one in so many is made to show it: while nothing is known, in the
# first windows of a run or after a pause; and from then on.
_EXPLORING, _EXPLORED, _SPARSE = 4, 200, 50
_FRESH = 10  # windows at first that are as the user has them: no larger batch at a run's very start


@dataclass(frozen=True)
class _Measured:
    """A window whose figures are on their way. `rows` of its micro-batches; `spent` on measuring it."""

    sums: Late
    stamps: Stamped
    rows: tuple[int, ...]
    spent: Spent

    def figures(self, deciding_s: float) -> list[float]:
        """Return sums, then seconds a row before the last micro-batch, fixed, whole, and spent; nan where unknown."""
        seconds, before = self.stamps.read(), sum(self.rows[:-1])
        row_s = sum(seconds.micro_s) / before if before else math.nan
        fixed_s = seconds.window_s - row_s * sum(self.rows)
        return [*self.sums.read(), row_s, fixed_s, seconds.window_s, self.spent.read() + deciding_s]


def control_of(
    plan: Plan, model: nn.Module, optimizer: Optimizer, exchange: Exchange, note: Note
) -> BatchControl | FixedBatch:
    """Return what controls the batch of a run; arguments as of `BatchControl`."""
    return FixedBatch() if plan.batch_rule is None else BatchControl(plan, model, optimizer, exchange, note)


class BatchControl:
    """The batch of a run whose plan freed it.

    Args:
        plan: has a batch rule. note: called with an event's name and figures.

    Attributes:
        k: micro-batches per window and rank, a multiple of a loader batch's own.

    Raises:
        ValueGivenError: a model under FSDP1.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, exchange: Exchange, note: Note) -> None:
        assert plan.batch_rule is not None
        self._rule, self._exchange, self._note = plan.batch_rule, exchange, note
        self._unit = plan.num_micro_batches
        self._micro_rows = plan.batch_rows / self._unit
        self._may_split = keeps_maths(plan, model)
        self.k = min(-(-self._rule.k // self._unit) * self._unit, most(self._rule, self._unit))
        self._base_k = self.k
        self._average, self._times = NoiseAverage(), WindowTimes()
        self._account = Account("noise monitor")
        self._follower = RateFollower.for_optimizer(self._rule.learning_rate, optimizer)
        self._monitor = NoiseMonitor(model, optimizer)
        self._seen_apart = 1 if self._monitor.is_sharded else exchange.num_ranks
        self._clock = WindowClock(next(model.parameters()).device)
        self._measured: _Measured | None = None
        self._sums: tuple[Late, Spent] | None = None
        self._rows: list[int] = []
        self._deciding_s = 0.0
        self._absorbed_at = 0
        self._measures = self._rule.policy != "throughput_per_memory"  # which is given all it needs
        self._pays: bool | None = None
        if not self._measures:
            self._decide()

    # What a window is made of.

    @property
    def noise(self) -> Noise | None:
        """What the windows so far say."""
        return self._average.noise

    @property
    def num_batches(self) -> int:
        """Loader batches of the next window: as decided, or two where one alone shows nothing and cannot be split."""
        doubles = self._rule.policy != "fixed" and not self._may_split and most(self._rule, self._unit) > 1
        return 2 if doubles and self._probes else self._decided

    @property
    def _decided(self) -> int:
        return -(-self.k // self._unit)

    def micro_batch_of(self, rows: int, planned: int, num_batches: int) -> int:
        """Return rows per micro-batch: a window of one is split in two where it is to show what one does not."""
        is_one = num_batches * -(-rows // planned) == 1
        return -(-rows // 2) if is_one and self._may_split and rows > 1 and self._probes else planned

    @property
    def _probes(self) -> bool:
        """Whether the next window is to have two micro-batches at the least: for the noise, or the time of one."""
        if self.k > 1 or not self._measures or self._account.windows < _FRESH:
            return False
        if self._rule.policy == "fixed" and self._seen_apart > 1:
            return False
        is_known = is_known_well(self._rule, self.noise) and self._times.is_known
        explores = not is_known and self._account.windows - self._account.began < _EXPLORED
        return self._account.is_due(sparse=_EXPLORING if explores else _SPARSE)

    def rate_factor(self, num_batches: int) -> float:
        """Return the factor on the learning rate for a window of so many loader batches."""
        return self._follower.factor(num_batches, self._decided)

    # What happens in it.

    def opened(self, num_micro_batches: int) -> None:
        """A window's first micro-batch is about to be handed out."""
        self._rows.clear()
        shows = self._measures and num_micro_batches * self._seen_apart > 1
        if shows and (self._account.is_due(free=self._rule.min_windows) or self._probes):
            self._monitor.open(at_once=num_micro_batches == 1)
            self._clock.open()

    def begun(self, rows: int) -> None:
        """A micro-batch is about to be handed out."""
        if self._monitor.is_on:
            self._rows.append(rows)
            self._clock.begin()

    def backward_done(self, rows: int, terms: Count) -> None:
        """A micro-batch had its backward."""
        if self._monitor.is_on:
            self._monitor.backward_done(rows, terms)

    def stepping(self, weights: WindowWeights, scale: float | Tensor) -> None:
        """The window's gradient is whole, at its loss scale, and nobody has changed it."""
        if self._monitor.is_on:
            with self._clock.aside():
                self._sums = self._monitor.close(weights.divisor, weights.correction, scale)

    def stepped(self, num_batches: int, *, applied: bool) -> None:
        """The window is over; void, it says nothing. What an earlier one said has arrived."""
        measured = None
        if self._sums is not None and applied:
            late, spent = self._sums
            measured = _Measured(late, self._clock.end(), tuple(self._rows), spent)
        start = time.perf_counter()
        if applied:
            self._follower.applied(num_batches, self._decided)
        shared = self._exchange.take()
        if shared is not None:
            self._absorb(shared)
        if self._measured is not None:
            self._exchange.put(self._measured.figures(self._deciding_s))
            self._deciding_s = 0.0
        self._measured = measured
        self.dropped()
        self._account.pass_window()
        self._deciding_s += time.perf_counter() - start

    def dropped(self) -> None:
        """The window was given up, or is over."""
        self._monitor.drop()
        self._clock.drop()
        self._sums = None

    # What it is taken for.

    def _absorb(self, shared: list[list[float]]) -> None:
        """Take the figures of all ranks in, and decide."""
        window = self._monitor.noise_of([figures[:NUM_FIGURES] for figures in shared])
        row_s, fixed_s, window_s, spent_s = zip(*(figures[NUM_FIGURES:] for figures in shared), strict=True)
        if window is not None:
            self._average.add(window, age=self._account.windows - self._absorbed_at)
            self._absorbed_at = self._account.windows
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
        if self._rule.policy != "goodput":
            return
        review = self._account.review(self._gain())
        if review is not None and review.pays != self._pays:
            self._pays = review.pays
            self._note("account", asdict(review))
        if review is not None and not review.pays:
            self._average, self._pays = NoiseAverage(), None  # by the end of the pause it says nothing any more

    def _gain(self) -> float | None:
        return gain(self._rule, self._standing(), self._base_k)

    def close(self) -> dict[str, Any] | None:
        """Share nothing more; return what measuring took, as a share of the windows' time, and what it could bring."""
        self._exchange.close()
        self._monitor.end()
        if not self._account.uses:
            return None
        figures = {"technique": self._account.technique, "price": self._account.share, "gain": self._gain()}
        return figures | {"windows": self._account.windows, "measured": self._account.uses}

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
        load_parts(dict(self._parts()), {name: state[name] for name, _ in self._parts()})
        self.k, self._base_k = k, base_k
        self._absorbed_at = self._account.windows

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
