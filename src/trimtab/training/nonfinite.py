"""Non-finite policy: warn about, skip or raise for steps with non-finite loss or gradients; replacement of fp16.

"skip" and "stop" check before a step is applied, which synchronises. "warn" and "error" read the loss of an applied
step during the next step, without synchronising.

Under fp16, an overflow skips a step and lowers the loss scale, as usual in the first steps. If the loss itself is
non-finite, a lower scale does not help and the scale is kept: the cause is in data, loss or weights, or a value of the
forward exceeds the range of fp16. If overflows continue at the lowest scale, or non-finite losses continue, bf16 or
fp32 replaces fp16. Non-finite gradients are then skipped, as under fp16, and a run without any finite gradient raises.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.core import validation
from trimtab.core.errors import NonFiniteError
from trimtab.core.stateful import Load, Stateful, checked_state
from trimtab.measure.timing import AsyncScalar

POLICIES = ("warn", "error", "skip", "stop", "continue")
BEFORE_THE_STEP, ENDING = ("skip", "stop"), ("error", "stop")
# Consecutive skipped steps after which a run raises.
PATIENCE = 25
# Smallest useful loss scale, relative to the mean loss; overflows below have another cause.
SCALE_FLOOR = 2.0**-4
# fp16 is replaced if, of the last 64 steps, half overflowed or a quarter had a non-finite loss despite finite data, or
# after eight such losses in a row.
_LOOK_BACK, _TOO_MANY = 64, 0.5
_TOO_MANY_LOST, _LOST_IN_A_ROW = 0.25, 8
_LOOK_FOR = (
    "Look for NaN or infinity in the data, and for a logarithm, a root or a division in the loss. If training "
    "diverged, lower the learning rate or set clip_norm."
)
_LATE = (
    "Later steps may have been applied, so resume from an earlier checkpoint. "
    f'{_LOOK_FOR} Pass nonfinite="skip" to drop such steps, or nonfinite="stop" to raise before such a step is applied.'
)
_COUNTS, _NUMBERS = ("in_a_row", "lost_in_a_row", "total"), ("windows", "share", "lost")


Note = Callable[[str, Mapping[str, Any]], None]


class Cause(NamedTuple):
    """Reason for replacing fp16: a stable identifier, such as "fp16.overflows", and a clause for a sentence."""

    code: str
    reason: str


class NonFinitePolicy(Stateful):
    """Counts skipped steps of a run and applies the non-finite policy, an element of `POLICIES` (None means "warn").

    Args:
        is_alone: True if the loss may be checked; with several ranks a rank only knows its own loss, and ranks must
            agree.

    Attributes:
        wants_norm: True if the gradient norm of every window is needed.
        in_a_row: skipped steps in a row, without overflows of fp16.
        lost_in_a_row: steps in a row with a non-finite loss of finite data.
        total: skipped steps.
        windows: finished windows.
        share: fraction of the last windows whose gradients overflowed in fp16.
        lost: fraction of the last windows with a non-finite loss of finite data.
    """

    wants_norm: bool

    def __init__(self, policy: str | None, note: Note | None = None, *, is_alone: bool = True) -> None:
        if policy is not None:
            validation.one_of("nonfinite", policy, POLICIES)
        self._own, self._is_alone = policy if policy in BEFORE_THE_STEP else None, is_alone
        self._apply(self._own)
        self._asked, self._note, self._has_warned = policy or "warn", note, False
        self._late: tuple[int, AsyncScalar] | None = None
        self.in_a_row = self.lost_in_a_row = self.total = 0
        self.windows = self.share = self.lost = 0.0
        self._skips = False

    def _apply(self, policy: str | None) -> None:
        self._policy, self.wants_norm = policy, policy is not None

    def is_void(self, norm: Tensor | None, loss: Tensor, *, scaled: bool) -> bool:
        """Return True if a window must not be applied. Reads one scalar from the device if the policy requires it.

        Args:
            scaled: True if the loss scaler checks the gradients, so that only the loss is checked here.

        Raises:
            NonFiniteError: the window is non-finite and the policy is "stop".
        """
        if self._policy is None or norm is None:
            return False
        looked_at = ([] if scaled else [norm]) + ([loss] if self._is_alone else [])
        found = not looked_at or bool(torch.stack([torch.isfinite(each) for each in looked_at]).all())
        if not found and self._policy == "stop":
            raise _error(f"A step has the loss {float(loss):g} and the gradient norm {float(norm):g}")
        self._skips = not found
        return not found

    def is_no_overflow(self, loss: Tensor) -> bool:
        """Return True if a step was skipped because of a non-finite loss, not an overflow of scaled gradients."""
        return not self._skips and self._is_alone and not bool(torch.isfinite(loss))

    def note(self, loss: Tensor, *, applied: bool, has_bad_data: Callable[[], bool] = lambda: False) -> None:
        """Count a finished window.

        Args:
            has_bad_data: returns True if the data contain NaN; called if the loss is non-finite.

        Raises:
            NonFiniteError: too many steps in a row were skipped for other reasons than an overflow.
        """
        failed = not applied and (self._skips or self.is_no_overflow(loss))
        overflowed, self._skips = not applied and not failed, False
        looked_back = min(_LOOK_BACK, self.windows + 1)
        self.share += (float(overflowed) - self.share) / looked_back
        lost = failed and not bool(torch.isfinite(loss)) and not has_bad_data()
        self.lost += (float(lost) - self.lost) / looked_back
        self.lost_in_a_row = self.lost_in_a_row + 1 if lost else 0
        self.windows += 1
        self.total += not applied
        self.in_a_row = 0 if applied else self.in_a_row + failed
        if self.in_a_row >= PATIENCE:
            problem = f"{self.in_a_row} steps in a row had non-finite gradients, the last with the loss"
            raise _error(f"{problem} {float(loss):g}")

    def outlasts(self, scale: float, loss: Tensor) -> Cause | None:
        """Return the reason for replacing fp16 after a skipped step, or None. A policy of None then becomes "skip".

        Raises:
            NonFiniteError: the loss is non-finite at the lowest loss scale.
        """
        cause = None
        if scale < SCALE_FLOOR:
            if self._is_alone and not bool(torch.isfinite(loss)):
                raise _error(f"The loss is {float(loss):g}, and gradients overflow at every loss scale")
            cause = Cause("fp16.overflows_at_any_scale", f"gradients overflow at a loss scale of {scale:g}")
        elif self.windows >= _LOOK_BACK and self.share >= _TOO_MANY:
            cause = Cause("fp16.overflows", f"{100 * self.share:.0f}% of the last steps overflowed")
        elif self.lost_in_a_row >= _LOST_IN_A_ROW or (self.windows >= _LOOK_BACK and self.lost >= _TOO_MANY_LOST):
            reason = f"the loss of {100 * self.lost:.0f}% of the last steps is non-finite; a value of the forward may "
            cause = Cause("fp16.loss_nonfinite", reason + "exceed 65504, the largest fp16 number")
        if cause is not None:
            self._apply(self._policy or "skip")
        return cause

    def applied(self, step: int, loss: Tensor) -> None:
        """Check the loss of the previous applied step, and keep this step's loss. On a CPU, check this step's loss.

        `NonFiniteError` if the loss is non-finite and the policy is "error".
        """
        if loss.device.type == "meta" or (self._asked != "error" and (self._asked != "warn" or self._has_warned)):
            return
        if loss.device.type == "cpu":
            self._look_at(step, host_value(loss))
            return
        before, self._late = self._late, (step, AsyncScalar(loss))
        if before is not None:
            self._look_at(before[0], before[1].read()[0])

    def over(self, error: BaseException | None = None) -> None:
        """Check the loss of the last step, as `applied`, unless the run ended with an error."""
        before, self._late = self._late, None
        if error is None and before is not None:
            self._look_at(before[0], before[1].read()[0])

    def _look_at(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self.report(f"the loss of step {step} is {loss:g}")

    def report(self, what: str) -> None:
        """Warn once, or raise `NonFiniteError` by the policy, because a value has become non-finite.

        Args:
            what: clause with the value, such as "the loss of step 3 is nan".
        """
        if self._asked == "continue" or (self._has_warned and self._asked not in ENDING):
            return
        if self._note is not None and not self._has_warned:
            self._note("nonfinite", {"found": what, "policy": self._asked})
        self._late, self._has_warned = None, True
        if self._asked in ENDING:
            problem = f"Training became non-finite: {what}."
            raise NonFiniteError("training", problem=problem, got=what, hint=_LATE, code="training.nonfinite")
        warnings.warn(f"Training became non-finite: {what}. {_LATE}", RuntimeWarning, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_COUNTS, *_NUMBERS)} | {"policy": self._policy}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return a function that restores a `state_dict()`. A policy set for this run takes precedence."""
        found = checked_state("state.voids", state, integers=_COUNTS, numbers=_NUMBERS, others=("policy",))
        if state["policy"] is not None:
            validation.one_of("state.voids.policy", state["policy"], POLICIES)

        def load() -> None:
            vars(self).update(found)
            self._apply(self._own or state["policy"])

        return load


def host_value(loss: Tensor) -> float:
    """Return the value of a loss in host memory, for which nothing has to be waited."""
    return float(loss.numpy(force=True))


def _error(problem: str) -> NonFiniteError:
    return NonFiniteError(
        "gradient",
        problem=f"{problem}; parameters and optimizer state are as before the step.",
        hint=_LOOK_FOR,
        code="step.nonfinite",
    )
