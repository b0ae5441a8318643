"""Whether a run is over: its smoothed gradient norm, read a window late, or an evaluation's value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from trimtab.core import checks
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.core.stop import Stop, StopReason
from trimtab.measure.late import Late

_KEEP = 0.9  # of the average, a window; nothing is said before it holds two thirds of what it will
_MIN_WINDOWS = 10
_STATE = ("average", "weight", "seen", "pending", "reason", "conditions")


class StopTest(Part):
    """The conditions of one run. `reason` is None while it goes on.

    Attributes:
        asked: what this rank asks all to stop for, after the next window that they say anything in.
    """

    def __init__(self, stop: Stop | None) -> None:
        self._stop = stop
        self._norm: Late | float | None = None  # of the last window
        self._average, self._weight, self._seen = 0.0, 0.0, 0
        self.reason: StopReason | None = None
        self.asked: StopReason | None = None

    @property
    def _conditions(self) -> dict[str, Any] | None:
        return None if self._stop is None else asdict(self._stop)

    @property
    def wants_norm(self) -> bool:
        """Whether the norm of every window's gradient is needed."""
        return self._stop is not None and self._stop.grad_norm is not None

    def stepped(self, norm: Tensor | None) -> None:
        """A window was applied; its norm is read when the next one is."""
        if not self.wants_norm or norm is None:
            return
        pending = self._pending()
        if pending is not None:
            self._add(pending)
        self._norm = Late(norm)

    def evaluated(self, value: float) -> None:
        """An evaluation's value is known."""
        if self._stop is not None and self._stop.is_met(value):
            self.reason = StopReason.TARGET

    def adopt(self, reason: StopReason | None) -> None:
        """Another rank stops, for a reason; or none does."""
        self.reason = self.reason or reason

    def _pending(self) -> float | None:
        """Return the norm that the next window counts; it waits for the device. None where it counts none."""
        if isinstance(self._norm, Late):
            self._norm = self._norm.read()[0]
        return self._norm if self._norm is not None and math.isfinite(self._norm) else None

    def _add(self, norm: float) -> None:
        assert self._stop is not None
        assert self._stop.grad_norm is not None
        self._average = _KEEP * self._average + (1 - _KEEP) * norm
        self._weight = _KEEP * self._weight + (1 - _KEEP)
        self._seen += 1
        if self._seen >= _MIN_WINDOWS and self._average / self._weight <= self._stop.grad_norm:
            self.reason = StopReason.GRAD_NORM

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; one that was over stays so under the conditions that ended it.

        The last norm is not counted by that: a run that is saved would be over a window before one that is not.
        """
        is_over = self.reason not in (None, StopReason.INTERRUPTED)  # it was interrupted to be gone on with
        reason = self.reason.value if self.reason is not None and is_over else None
        average = {"average": self._average, "weight": self._weight, "seen": self._seen}
        average |= {"pending": self._pending()}
        return average | {"reason": reason, "conditions": self._conditions}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        require_keys("state.stop", state, _STATE)
        average, weight = (checks.number(f"state.stop.{name}", state[name], low=0) for name in ("average", "weight"))
        if state["reason"] is not None:
            checks.one_of("state.stop.reason", state["reason"], tuple(StopReason))
        seen = checks.integer("state.stop.seen", state["seen"], low=0)
        pending = None if state["pending"] is None else checks.number("state.stop.pending", state["pending"], low=0)
        is_over = state["reason"] is not None and state["conditions"] == self._conditions

        def load() -> None:
            self._seen, self._average, self._weight, self._norm = seen, average, weight, pending
            self.reason = StopReason(state["reason"]) if is_over else None

        return load
