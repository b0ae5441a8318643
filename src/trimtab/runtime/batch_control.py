"""k while training: what measured windows say, what a rule makes of it, and the learning rate that follows.

A window may be measured (noise and times); its figures are read a window later, shared between ranks in the next, and
decided upon then: always from figures that are the same on every rank. Windows that are not measured cost nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core import checks
from trimtab.core.errors import FormatError
from trimtab.core.plan import Plan
from trimtab.decide.accounts import PATIENCE, Account
from trimtab.decide.accumulation import Noise, Standing, could_save, decide, gain, most
from trimtab.decide.noise import NoiseAverage
from trimtab.decide.window_times import UsualWindow, WindowTimes
from trimtab.measure.window_clock import WindowClock
from trimtab.runtime import compiled
from trimtab.runtime.accumulation import Count, WindowWeights
from trimtab.runtime.batch_doors import check_rule, require_one_plan
from trimtab.runtime.exchange import Exchange
from trimtab.runtime.fixed_batch import FixedBatch
from trimtab.runtime.measured import Measured, Nothing
from trimtab.runtime.noise_monitor import NUM_FIGURES, Figures, NoiseMonitor
from trimtab.runtime.probing import Probing
from trimtab.runtime.run_state import load_parts
from trimtab.runtime.schedule import RateFollower, normalises
from trimtab.runtime.splitting import keeps_maths

Note = Callable[[str, Mapping[str, Any]], None]


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
        k: micro-batches per window and rank, a multiple of a loader batch's own; by "throughput_per_memory", which
            leaves the batch as it is, those that it is cut into.

    Raises:
        ValueGivenError: a model under FSDP1; a batch to be cut that cannot be; a plan that is not the one of the other
            ranks.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, exchange: Exchange, note: Note) -> None:
        assert plan.batch_rule is not None
        self._rule, self._exchange, self._note = plan.batch_rule, exchange, note
        self._unit = plan.num_micro_batches
        self._micro_rows = plan.batch_rows / self._unit
        may_split = keeps_maths(plan, model)
        is_compiled = bool(plan.compiled.value) or compiled.is_compiled(model)
        self._cuts = self._rule.policy == "throughput_per_memory"
        require_one_plan(plan, exchange)  # which all ranks reach, before one of them may refuse
        check_rule(plan, may_split=may_split)
        self.k = min(-(-self._rule.k // self._unit) * self._unit, most(self._rule, self._unit))
        self._base_k = self.k
        self._average, self._times, self._usual = NoiseAverage(), WindowTimes(), UsualWindow()
        self._account = Account("noise monitor")
        self._follower = RateFollower.for_optimizer(self._rule.learning_rate, optimizer)
        self._normalises = self._follower.rule == "sqrt" and normalises(optimizer)
        self._monitor = NoiseMonitor(model, optimizer)
        self._seen_apart = 1 if self._monitor.is_sharded else exchange.num_ranks
        self._measures = not self._cuts  # which is given all it needs
        shows_one = self._seen_apart > 1 or not self._measures
        self._probing = Probing(
            self._rule,
            self._unit,
            self._account,
            self._times,
            may_split=may_split and not is_compiled,  # half a batch would be compiled anew
            shows_one=shows_one,
        )
        self._clock = WindowClock(next(model.parameters()).device)
        self._measured: Measured | Nothing | None = None
        self._said: Figures | None = None
        self._rows: list[int] = []  # of each loader batch of a window
        self._deciding_s = 0.0
        self._absorbed_at = 0
        self._is_probe = self._was_probe = self._retries_probe = self._owes = self._is_used = self._is_cut = False
        self._opened_s = 0.0
        self._pays: bool | None = None
        self._last_gain: float | None = None
        if not self._measures:
            self._decide()

    # What a window is made of.

    @property
    def noise(self) -> Noise | None:
        """What the windows so far say."""
        return self._average.noise

    @property
    def num_batches(self) -> int:
        """Loader batches of the next window: as decided, or more where those do not show what is needed."""
        return self._probing.batches(self._decided, self.k, self.noise)

    @property
    def _decided(self) -> int:
        return 1 if self._cuts else -(-self.k // self._unit)

    def micro_batch_of(self, rows: int, planned: int, num_batches: int) -> int:
        """Return rows per micro-batch: a window of one is split in two where that shows the noise."""
        if self._cuts:
            return -(-rows // self.k)
        is_one = num_batches * -(-rows // planned) == 1
        self._is_cut = is_one and rows > 1 and self._probing.splits(self.k, self.noise)
        return -(-rows // 2) if self._is_cut else planned

    def rate_factor(self, num_batches: int) -> float:
        """Return the factor on the learning rate for a window of so many loader batches."""
        return self._follower.factor(num_batches, self._decided)

    # What happens in it.

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Take the time of what runs inside: the next window's batches are drawn."""
        return self._clock.drawing() if self._is_next_due else contextlib.nullcontext()

    @property
    def _is_next_due(self) -> bool:
        """Whether the next window is to be measured, if it shows anything."""
        return self._measures and (self._account.is_due() or self._probing.is_due(self.k, self.noise))

    def opened(self, num_batches: int, num_micro_batches: int) -> None:
        """A window begins."""
        self._rows.clear()
        is_larger = num_batches > self._decided or (self._is_cut and num_micro_batches > 1)
        self._is_probe = self._retries_probe or (is_larger and self._probing.is_due(self.k, self.noise))
        # Ranks put figures in the same windows: what is due is known to all, how many batches a rank has left is not.
        self._owes = self._exchange.num_ranks > 1 and self._is_next_due
        is_due = self._owes or self._is_probe or self._account.is_due()
        self._opened_s = time.perf_counter()
        is_seen = self._measures and is_due and num_micro_batches * self._seen_apart > 1
        self._is_used = self._owes or (is_seen and self._exchange.num_ranks == 1)
        if is_seen:
            self._monitor.open()
            self._clock.open()

    def begun(self, rows: int, *, of_next: bool, last: bool) -> None:
        """A micro-batch is about to be handed out, of the next loader batch or of the same; `last`: of the window."""
        if not self._monitor.is_on:
            return
        if last and self._seen_apart > 1:
            self._monitor.at_once()
        if of_next:
            self._rows.append(0)
            self._monitor.batch_begins()
            self._clock.begin()
        self._rows[-1] += rows

    def backward_begins(self) -> None:
        """A micro-batch's loss was computed."""
        if self._monitor.is_on:
            self._monitor.backward_begins()

    def backward_done(self, rows: int, terms: Count) -> None:
        """A micro-batch had its backward."""
        if self._monitor.is_on:
            self._monitor.backward_done(rows, terms)

    def stepping(self, weights: WindowWeights, scale: float | Tensor) -> None:
        """The window's gradient is whole, at its loss scale, and nobody has changed it."""
        if self._monitor.is_on:
            with self._clock.aside():
                self._said = self._monitor.close(weights.divisor, weights.correction, scale)

    def stepped(self, num_batches: int, *, applied: bool) -> None:
        """The window is over; void, it says nothing. What an earlier one said has arrived."""
        start = time.perf_counter()
        measured = self._told(num_batches, start - self._opened_s, applied=applied)
        if applied:
            self._follower.applied(num_batches, self._decided)
        waiting = time.perf_counter()
        shared = self._exchange.take()
        if self._measured is not None:
            self._measured.wait()
        waited_s = time.perf_counter() - waiting  # for ranks and device, which are at work meanwhile: it costs nothing
        if shared is not None:
            self._absorb(shared)
        if self._measured is not None:
            self._exchange.put(self._measured.figures(self._deciding_s))
            self._deciding_s = 0.0
        self._measured, self._retries_probe = measured, False
        if self._is_probe:
            self._probing.used(num_batches, self._decided)
        if self._is_used:  # noted once the window is over: one that is given up is due again, on all ranks
            self._account.use()
        self.dropped()
        self._account.pass_window()
        self._deciding_s += time.perf_counter() - start - waited_s

    def _told(self, num_batches: int, seconds: float, *, applied: bool) -> Measured | Nothing | None:
        """Return what a window says, that took so long by the host's clock."""
        if self._said is not None and applied:
            extra_s = self._usual.extra(seconds, num_batches) if self._is_probe else 0.0
            return Measured(self._said, self._clock.end(), tuple(self._rows), self._probing.timed - 2, extra_s)
        if self._said is None and applied:
            self._usual.add(seconds, num_batches)
        return Nothing() if self._owes else None

    def dropped(self) -> None:
        """The window was given up, or is over."""
        self._monitor.drop()
        self._clock.drop()
        self._said = None
        self._was_probe = self._is_probe
        self._is_probe = self._owes = self._is_used = False

    def ran_out(self) -> bool:
        """Memory ran out in the window, which is run again; returns whether it was made larger, to show more.

        Where the user's has one micro-batch none is made for long: gradients do not fit beside a forward, as they would
        have to if k rose, and k stays.
        """
        if self._was_probe and self._probing.fits:
            self._probing.ran_out()
        if self._was_probe and self.k == 1:
            why = "held for now: memory ran out beside another micro-batch's gradients"
            self._note("k", {"from": self.k, "to": self.k, "wanted": None, "reason": why})
        self._retries_probe = self._was_probe
        return self._was_probe

    # What it is taken for.

    def _absorb(self, shared: list[list[float]]) -> None:
        """Take the figures of all ranks in, and decide."""
        window = self._monitor.noise_of([figures[:NUM_FIGURES] for figures in shared])
        row_s, fixed_s, window_s, spent_s = zip(*(figures[NUM_FIGURES:] for figures in shared), strict=True)
        if window is not None:
            self._average.add(window, age=self._account.windows - self._absorbed_at)
            self._absorbed_at = self._account.windows
        elif self._measures and self._account.uses == PATIENCE and self.noise is None:
            self._note("noise", {"known": False, "reason": f"{PATIENCE} windows that were measured said nothing"})
        if not math.isnan(sum(row_s)):  # a rank that waits for another takes it for a fixed part of its window
            self._times.add(max(row_s), min(fixed_s))
        if told := [both for both in zip(window_s, spent_s, strict=True) if not math.isnan(both[0])]:
            self._account.charge(max(window for window, _ in told), max(spent for _, spent in told))
        self._decide()
        self._review()

    def _standing(self) -> Standing:
        times = self._times.times(self._micro_rows)
        ranks = self._exchange.num_ranks
        return Standing(self.k, self._unit, self._micro_rows, ranks, self.noise, times, self._normalises)

    def _decide(self) -> None:
        if self.k == 1 and not self._probing.fits:
            return
        standing = self._standing()
        decision = decide(self._rule, standing)
        self._probing.could_save = could_save(self._rule, standing)
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
        review = self._account.review(self._gain(), self._prospect)
        if review is not None and review.pays != self._pays:
            self._pays = review.pays
            self._note("account", asdict(review))
        if review is not None and not review.pays:
            self._average, self._pays = NoiseAverage(), None  # by the end of the pause it says nothing any more
            self._times.forget()

    def _prospect(self) -> float:
        """Return what the best k may come to save by the end of a pause: noise grows, at the most as a run does."""
        standing, account = self._standing(), self._account
        if standing.noise is None or not account.windows:
            return 0.0
        growth = 1 + account.pause / account.windows
        return gain(self._rule, replace(standing, noise=standing.noise.grown(growth)), self._base_k) or 0.0

    def _gain(self) -> float | None:
        found = gain(self._rule, self._standing(), self._base_k)
        self._last_gain = self._last_gain if found is None else found
        return found

    def close(self) -> dict[str, Any] | None:
        """Share nothing more; return what measuring took, as a share of the windows' time, and what it could bring."""
        self._exchange.close()
        self._monitor.end()
        if not self._account.uses:
            return None
        self._gain()
        figures = {"technique": self._account.technique, "price": self._account.share, "gain": self._last_gain}
        return figures | {"windows": self._account.windows, "measured": self._account.uses}

    # What a resumed run needs.

    def state_dict(self) -> dict[str, Any]:
        """Return a window's loader batches, averages, times, the account and the rate that follows.

        Figures on their way are not in it.
        """
        batches = {"batches": self._decided, "base_batches": self._base_k // self._unit}
        return batches | {name: part.state_dict() for name, part in self._parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            FormatError, ValueGivenError: not such a state; nothing was changed.
        """
        expected = {"batches", "base_batches", *(name for name, _ in self._parts())}
        if not isinstance(state, Mapping) or set(state) != expected:
            raise FormatError("state.batch", given=f"{state!r:.80}", expected="the keys " + ", ".join(sorted(expected)))
        batches, base = (
            checks.integer(f"state.batch.{name}", state[name], high=self._rule.k_max)
            for name in ("batches", "base_batches")
        )
        load_parts(dict(self._parts()), {name: state[name] for name, _ in self._parts()})
        if not self._cuts:  # k_max counts micro-batches, which may be smaller now
            self.k, self._base_k = (min(n * self._unit, most(self._rule, self._unit)) for n in (batches, base))
            if self._decided != batches:
                why = f"k_max = {self._rule.k_max} allows {self._decided} of the {batches} loader batches there were"
                self._note("k", {"from": batches * self._unit, "to": self.k, "wanted": None, "reason": why})
        self._absorbed_at = self._account.windows

    def _parts(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("noise", self._average),
            ("times", self._times),
            ("account", self._account),
            ("probing", self._probing),
            ("rate", self._follower),
        )
