"""Early stopping (paper section III: the convergence constraint)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError


class StopReason(enum.StrEnum):
    """Reason for ending a run before its data end, as recorded."""

    GRAD_NORM = "grad_norm"
    TARGET = "target"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Stop:
    """Stopping conditions; any of them ends the run.

    Args:
        grad_norm: stop when the gradient norm, smoothed over windows, is at most this (paper: ||grad|| <= eps).
        target: stop when a value passed to `run.evaluated` is at least this, or at most with `smaller_is_better`.

    Raises:
        ValueGivenError: a value is out of range, or there is no condition.
    """

    grad_norm: float | None = None
    target: float | None = None
    smaller_is_better: bool = False

    def __post_init__(self) -> None:
        if self.grad_norm is None and self.target is None:
            raise ValueGivenError("stop", got="no condition", expected="grad_norm, target or both")
        if self.grad_norm is not None:
            validation.number("stop.grad_norm", self.grad_norm, low=0, open_low=True)
        if self.target is not None:
            validation.number("stop.target", self.target)

    def is_met(self, value: float) -> bool:
        """Return True if an evaluation reaches the target; False without a target, or for NaN."""
        if self.target is None:
            return False
        return value <= self.target if self.smaller_is_better else value >= self.target
