"""Early stopping on the smoothed gradient norm, read one window late, or on an evaluation's value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from trimtab.core import validation
from trimtab.core.stateful import Load, Stateful, checked_state
from trimtab.core.stopping_rule import Stop, StopReason
from trimtab.measure.timing import AsyncScalar
from trimtab.training.hooks import Hook, Outcome

# Decay of the moving average per window. No decision before the average has two thirds of its final weight.
_KEEP, _MIN_WINDOWS = 0.9, 10


class EarlyStopping(Stateful, Hook):
    """Stop conditions of a run. A hook of runs with a condition on the gradient norm.

    Attributes:
        reason: the condition that was met; None while the run continues.
        asked: this rank's request to stop all ranks, sent with the next window.
        wants_norm: True if the gradient norm of every window is needed.
    """

    def __init__(self, stop: Stop | None) -> None:
        self._stop, self._limit = stop, None if stop is None else stop.grad_norm
        self.wants_norm = self._limit is not None
        self._norm: AsyncScalar | float | None = None  # Norm of the last window.
        self._average, self._weight, self._seen = 0.0, 0.0, 0
        self.reason: StopReason | None = None
        self.asked: StopReason | None = None

    def window_ends(self, outcome: Outcome) -> None:
        if outcome.applied:
            self.stepped(outcome.grad_norm)

    def stepped(self, norm: Tensor | None) -> None:
        """Take the norm of an applied window; it is read at the next applied window."""
        if self._limit is None or norm is None:
            return
        if (pending := self._pending()) is not None:
            self._average = _KEEP * self._average + (1 - _KEEP) * pending
            self._weight = _KEEP * self._weight + (1 - _KEEP)
            self._seen += 1
            if self._seen >= _MIN_WINDOWS and self._average / self._weight <= self._limit:
                self.reason = StopReason.GRAD_NORM
        self._norm = AsyncScalar(norm)

    def evaluated(self, value: float) -> None:
        """Check an evaluation's value."""
        if self._stop is not None and self._stop.is_met(value):
            self.reason = StopReason.TARGET

    def adopt(self, reason: StopReason | None) -> None:
        """Adopt another rank's stop reason, if any."""
        self.reason = self.reason or reason

    def _pending(self) -> float | None:
        """Return the norm that the next window will count, or None. Synchronises."""
        if isinstance(self._norm, AsyncScalar):
            self._norm = self._norm.read()[0]
        return self._norm if self._norm is not None and math.isfinite(self._norm) else None

    @property
    def _conditions(self) -> dict[str, Any] | None:
        return None if self._stop is None else asdict(self._stop)

    def state_dict(self) -> dict[str, Any]:
        """Return the moving average and the stop reason. A stopped run stays stopped under the same conditions.

        The last norm is stored but not counted: otherwise saving a run would end it one window earlier.
        """
        is_over = self.reason not in (None, StopReason.INTERRUPTED)  # An interrupted run is meant to be resumed.
        reason = self.reason.value if self.reason is not None and is_over else None
        average = {"average": self._average, "weight": self._weight, "seen": self._seen, "pending": self._pending()}
        return average | {"reason": reason, "conditions": self._conditions}

    def loading(self, state: Mapping[str, Any]) -> Load:
        others, where = ("pending", "reason", "conditions"), "state.stop"
        found = checked_state(where, state, integers=("seen",), numbers=("average", "weight"), others=others)
        if state["reason"] is not None:
            validation.one_of(f"{where}.reason", state["reason"], tuple(StopReason))
        pending = None if state["pending"] is None else validation.number(f"{where}.pending", state["pending"], low=0)
        is_over = state["reason"] is not None and state["conditions"] == self._conditions

        def load() -> None:
            self._seen, self._average, self._weight = found["seen"], found["average"], found["weight"]
            self._norm, self.reason = pending, StopReason(state["reason"]) if is_over else None

        return load
