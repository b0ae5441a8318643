"""Adaptive accumulation: chooses the number of micro-batches k per step and scales the learning rate to match.

Some windows are measured (gradient noise and times). Their values are read one window later, exchanged between ranks in
the next, and then used for a decision, so that every rank decides from the same values. Windows that are not measured
cost little.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.adaptive_batch.batch_size_decider import BatchSizeDecider, Note
from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate
from trimtab.adaptive_batch.noise_probes import ProbeSelection
from trimtab.core.errors import ValueGivenError
from trimtab.core.stateful import Load, Stateful, loading_parts
from trimtab.losses import Count
from trimtab.plans.plan import Plan
from trimtab.techniques import compiled_call
from trimtab.techniques.learning_rate import RateFollower, is_scale_invariant
from trimtab.training.accumulation import WindowWeights
from trimtab.training.hooks import CheckpointHooks, Hook, Outcome, WindowDecision
from trimtab.training.metadata_exchange import MetadataExchange
from trimtab.training.noise_monitor import NUM_SECONDS, NoiseMonitor, WindowMeasurements
from trimtab.training.split_conditions import keeps_maths
from trimtab.training.window import Window


def check_rule(plan: Plan, *, may_split: bool) -> None:
    """Raise `ValueGivenError` if the rule must split a batch that cannot be split; warn if `k_max` allows no change."""
    rule, unit = plan.batch_rule, plan.num_micro_batches
    assert rule is not None
    if rule.policy == "throughput_per_memory" and not may_split:
        raise ValueGivenError(
            "plan.batch_rule",
            problem='The batch policy "throughput_per_memory" splits batches, but splitting a batch of this loop '
            "changes its gradient.",
            hint='Use BatchRule("goodput"), or a loss that is a mean over samples and a model without batch '
            "statistics.",
            code="batch_rule.not_splittable",
        )
    if rule.spans_batches and rule.policy != "fixed" and unit > 1 and rule.k_max < 2 * unit:
        warnings.warn(
            f"BatchRule(k_max={rule.k_max}) has no effect: a loader batch has {unit} micro-batches, so that every step "
            f"has one loader batch. Pass k_max={2 * unit} or more to allow steps of two loader batches.",
            RuntimeWarning,
            stacklevel=2,
        )


def require_alike(exchange: MetadataExchange, facts: Mapping[str, object]) -> None:
    """Raise `ValueGivenError` on every rank if ranks differ in facts (by name) that decisions about k depend on."""
    if exchange.num_ranks == 1:
        return
    shared = exchange.share([zlib.crc32(str(value).encode()) for value in facts.values()])
    others = [name for i, name in enumerate(facts) if any(each[i] != shared[0][i] for each in shared)]
    if others:
        raise ValueGivenError(
            "plan.batch_rule",
            got=f"ranks that differ in {', '.join(others)}",
            expected="equal values on all ranks",
            hint="Build the same model and the same optimizer on every rank.",
            code="batch_rule.ranks_differ",
        )


class _WindowRole(NamedTuple):
    """Purpose of a window besides training.

    Attributes:
        is_probe: the window is larger than decided, or split, in order to measure the noise.
        asked: number of batches requested to measure noise that smaller windows do not show; 0 if not requested.
        owes: all ranks exchange values for this window, even if a rank has measured nothing.
        is_used: the overhead budget counts the window as measured.
        num_micro_batches: micro-batches in the window; equal on all ranks if micro-batches have collectives.
    """

    is_probe: bool = False
    asked: int = 0
    owes: bool = False
    is_used: bool = False
    num_micro_batches: int = 0


_TRAINS = _WindowRole()  # Role of a window that is not measured.


class _NextWindow(NamedTuple):
    """Composition of the next window, which is to be measured if it is due, and enlarged or split as a probe."""

    is_due: bool
    is_probe: bool
    num_batches: int


class BatchSizeController(Stateful, Hook):
    """Batch size controller of a run with an adaptive batch size.

    Args:
        weights: loss weights of the run's windows.
        keeper: stores decisions, so that a resumed run repeats its windows; None without checkpoints.

    Raises:
        ValueGivenError: the model is under FSDP1, a batch that must be split cannot be split, or ranks have different
            plans.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: MetadataExchange,
        note: Note,
        weights: WindowWeights,
        keeper: CheckpointHooks | None = None,
    ) -> None:
        assert plan.batch_rule is not None
        self._keeper, self._weights = keeper, weights
        self._rule, self._exchange, self._note = plan.batch_rule, exchange, note
        may_split = keeps_maths(plan, model)
        is_compiled = bool(plan.compiled.value) or compiled_call.is_compiled(model)
        self._cuts = self._rule.policy == "throughput_per_memory"
        self._measures = not self._cuts  # The policy "throughput_per_memory" needs no measurements.
        self._follower = RateFollower.for_optimizer(self._rule.learning_rate, optimizer)
        # A collective that all ranks must reach before one of them may raise.
        divides = is_scale_invariant(optimizer)
        facts = {"whether the batch can be split": may_split, "compilation": is_compiled, "kind of optimizer": divides}
        require_alike(exchange, facts)
        check_rule(plan, may_split=may_split)
        self._decider = BatchSizeDecider(
            self._rule,
            plan.num_micro_batches,
            plan.batch_size / plan.num_micro_batches,
            exchange.num_ranks,
            note,
            normalises=self._follower.rule == "sqrt" and divides,
        )
        self._account = self._decider.account
        self._watch = NoiseMonitor(model, optimizer, exchange.num_ranks)
        self._probing = ProbeSelection(
            self._rule,
            plan.num_micro_batches,
            self._account,
            self._decider.times,
            may_split=may_split and not is_compiled,  # Half a batch would cause a recompilation.
            shows_one=self._watch.seen_apart > 1 or not self._measures,
        )
        self._measured: WindowMeasurements | list[float] | None = None
        self._deciding_s, self._is_under_way = 0.0, False
        self._role = _TRAINS  # Of the open window, or of the last one.
        self._next: _NextWindow | None = None  # Computed once per window.
        self._is_watched = self._is_cut = self._retries_probe = False

    # Composition of windows.

    @property
    def k(self) -> int:
        """Micro-batches per window and rank. With "throughput_per_memory": parts that a loader batch is split into."""
        return self._decider.k

    @property
    def noise(self) -> NoiseEstimate | None:
        """Gradient noise measured so far."""
        return self._decider.noise

    @property
    def num_batches(self) -> int:
        """Loader batches of the next window: the decided number, or more if that number does not show the noise."""
        return self._look_ahead().num_batches

    def _look_ahead(self) -> _NextWindow:
        if self._next is None and (before := self._decided_before()) is not None:
            self._decider.repeat(before.k)
            is_probe = before.is_cut or before.num_batches > self._decider.num_batches
            self._next = _NextWindow(self._measures and self._account.is_due(), is_probe, before.num_batches)
        if self._next is None:
            k, noise, decided = self.k, self.noise, self._decider.num_batches
            is_probe = self._probing.is_due(k, noise)
            is_due = self._measures and (is_probe or self._account.is_due())
            num_batches = self._probing.batches(decided, k, noise) if is_probe else decided
            self._next = _NextWindow(is_due, is_probe, num_batches)
        return self._next

    def _decided_before(self) -> WindowDecision | None:
        return None if self._keeper is None else self._keeper.decided_before(self._account.windows)

    def micro_batch_of(self, rows: int, planned: int, num_batches: int) -> int:
        """Return samples per micro-batch. A window of one micro-batch is split in two if this shows the noise."""
        if self._cuts:
            return -(-rows // self.k)
        self._retries_probe = False  # A new window: the window that ran out of memory was dropped, or has ended.
        is_one = num_batches * -(-rows // planned) == 1
        before = self._decided_before()
        is_cut = self._probing.splits(self.k, self.noise) if before is None else before.is_cut
        self._is_cut = is_one and rows > 1 and is_cut
        return -(-rows // 2) if self._is_cut else planned

    def rate_factor(self, num_batches: float) -> float:
        """Return the learning rate factor of a window of `num_batches` loader batches."""
        return self._follower.factor(num_batches, self._decider.num_batches)

    # Events of a window.

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that measures the time to draw the next window's batches."""
        return self._watch.drawing() if self._look_ahead().is_due else contextlib.nullcontext()

    def window_begins(self, window: Window) -> None:
        """Begin a window. Windows with zero-weight micro-batches are not measured."""
        num_batches, num_micro_batches = window.num_batches, window.num_micro_batches
        ahead = self._look_ahead()
        if self._keeper is not None:
            self._keeper.decided(self._account.windows, WindowDecision(ahead.num_batches, self.k, is_cut=self._is_cut))
        self._role, self._is_watched = _TRAINS, False
        self._watch.begin()
        if ahead.is_due or self._retries_probe:
            shows_noise = num_micro_batches * self._watch.seen_apart > 1
            self._is_watched = self._measures and not window.num_padding and shows_noise
            self._role = self._role_of(ahead, num_batches, num_micro_batches)
        if self._is_watched:
            self._watch.open()

    def micro_batch_begins(self, rows: int, *, of_next: bool, last: bool) -> None:
        if self._is_watched:
            self._watch.micro_batch_begins(rows, of_next=of_next, last=last)

    def backward_begins(self) -> None:
        if self._is_watched:
            self._watch.backward_begins()

    def backward_ends(self, rows: int, terms: Count) -> None:
        if self._is_watched:
            self._watch.backward_ends(rows, terms)

    def gradient_complete(self, scale: float | Tensor) -> None:
        if self._is_watched:
            self._watch.close(self._weights, scale)

    def _role_of(self, ahead: _NextWindow, num_batches: int, num_micro_batches: int) -> _WindowRole:
        is_larger = num_batches > self._decider.num_batches or (self._is_cut and num_micro_batches > 1)
        # All ranks exchange values in the same windows: the schedule is common knowledge, the number of batches left on
        # a rank is not.
        owes = self._exchange.num_ranks > 1 and ahead.is_due
        return _WindowRole(
            is_probe=self._retries_probe or (is_larger and ahead.is_probe),
            asked=ahead.num_batches if self._probing.explores(self.k, self.noise) else 0,
            owes=owes,
            is_used=owes or (self._is_watched and self._exchange.num_ranks == 1),
            num_micro_batches=num_micro_batches,
        )

    def window_ends(self, outcome: Outcome) -> None:
        """End a window and process the values of earlier windows that have arrived. Skipped steps give no values."""
        start = time.perf_counter()
        num_batches = outcome.window.num_batches
        measured: WindowMeasurements | list[float] | None = None
        if outcome.applied:
            decided, first = self._decider.num_batches, self._probing.timed - 2
            measured = self._watch.ended(num_batches, decided, is_probe=self._role.is_probe, first=first)
        if measured is None and self._role.owes:
            measured = self._watch.nothing(self._role.num_micro_batches)
        if outcome.applied:
            self._follower.applied(outcome.agreed.num_batches, self._decider.num_batches)
        self._next = None
        if measured is None and self._role is _TRAINS and not self._is_under_way:
            self._retries_probe = False
            self._account.pass_window()
        else:
            self._took(measured, num_batches, start)

    def _took(self, measured: WindowMeasurements | list[float] | None, num_batches: int, start: float) -> None:
        """End a window that was measured, or in which values of an earlier window arrive."""
        waiting = time.perf_counter()
        shared, before = self._exchange.take(), self._measured
        if isinstance(before, WindowMeasurements):
            before.stamps.wait()
        # Waiting for ranks and device is no overhead, since both are at work meanwhile.
        waited_s = time.perf_counter() - waiting
        if shared is not None:
            self._absorb(shared)
        if before is not None:
            self._exchange.put(before if isinstance(before, list) else before.figures(self._deciding_s))
            self._deciding_s = 0.0
        self._measured, self._retries_probe = measured, False
        self._is_under_way = before is not None or measured is not None
        if self._role.asked:
            decided = self._decider.num_batches
            self._probing.explored(self._role.asked, decided)
            if num_batches > decided:
                reason = "the gradient noise scale needs more micro-batches than the step has"
                self._note("explored", {"batches": num_batches, "decided": decided, "reason": reason})
        if self._role.is_used:  # Counted once the window is over: a dropped window is measured again, on all ranks.
            self._account.use()
        self.window_dropped()
        self._account.pass_window()
        self._deciding_s += time.perf_counter() - start - waited_s

    def window_dropped(self) -> None:
        self._watch.drop()
        self._is_watched = False

    def ran_out(self) -> bool:
        """Handle an out-of-memory error in the window, which is run again.

        If the user's window has one micro-batch, k is fixed: accumulated gradients do not fit next to a forward pass,
        as a larger k would require.

        Returns:
            True if the window had been enlarged to measure the noise.
        """
        was_probe, self._next = self._role.is_probe, None
        if was_probe and self._probing.fits:
            self._probing.ran_out()
        if was_probe and self.k == 1:
            self._decider.hold("memory ran out with accumulated gradients, so every step keeps one micro-batch")
        self._retries_probe = was_probe
        return was_probe

    # Decisions.

    def _absorb(self, shared: list[list[float]]) -> None:
        """Process the values of all ranks and decide."""
        self._decider.absorb(self._watch.noise_of(shared), [figures[-NUM_SECONDS:] for figures in shared])
        if self.k > 1 or self._probing.fits:
            self._decider.decide()
            self._probing.told(self._decider.standing)
        self._decider.review()

    def close(self) -> dict[str, Any] | None:
        """Stop exchanging values; return the overhead of measuring as a fraction of time, and its potential benefit."""
        self._exchange.close()
        self._watch.end()
        return self._decider.summary()

    # State of a resumed run.

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def loading(self, state: Mapping[str, Any]) -> Load:
        load_parts = loading_parts(self._parts(), state, where="state.batch")

        def load() -> None:
            load_parts()
            self._next = None
            self._probing.told(self._decider.standing)

        return load

    def _parts(self) -> dict[str, Any]:
        return {"decided": self._decider, "probing": self._probing, "rate": self._follower}
