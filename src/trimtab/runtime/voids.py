"""Steps with non-finite losses or gradients: warned of, skipped or stopped at; and giving up a precision that fails.

"skip" and "stop" look before a step is applied, and wait for the device for it. "warn" and "error" read the loss of an
applied step while the next one runs, and wait for nothing.

Under fp16 an overflow voids a window and lowers the loss scale, which a first few windows are for. Where the loss
itself is no number, no lower scale mends it, and the scale stays: the cause lies in data, loss or weights, or a value
of the forward is beyond fp16. Where overflows go on at the lowest scale, or losses that are no numbers go on, a wider
precision takes fp16's place; there gradients that are no numbers are skipped, as they were under fp16, and a run that
meets nothing else stops.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core import checks
from trimtab.core.errors import NonFiniteError
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.measure.late import Late

POLICIES = ("warn", "error", "skip", "stop", "continue")
BEFORE_THE_STEP = ("skip", "stop")
# Skipped windows in a row after which a run stops.
PATIENCE = 25
# The loss scale per mean loss below which an overflow is not one.
SCALE_FLOOR = 2.0**-4
# Of so many windows, the share that overflows when fp16 is given up; or of losses that are no numbers where the data
# are, or so many of these in a row.
_LOOK_BACK, _TOO_MANY = 64, 0.5
_TOO_MANY_LOST, _LOST_IN_A_ROW = 0.25, 8
_LATE = (
    "Look for NaN or infinity in the data and for a log, a root or a division in the loss; lower the learning rate or "
    'set clip_norm where training diverged. nonfinite="skip" drops such steps, "stop" ends the run before one is '
    "applied. Steps since then may have been applied: resume from an earlier checkpoint."
)
_COUNTS = ("in_a_row", "lost_in_a_row", "total")
_BEYOND = "a value of the forward may be beyond fp16's 65504"


Note = Callable[[str, Mapping[str, Any]], None]


class Voids(Part):
    """Counts a run's void windows, and says what becomes of it.

    Args:
        policy: of `POLICIES`; None: "warn".
        note: records an event.
        is_alone: whether the loss can be looked at: one of several ranks knows its own only, and they have to agree.
    """

    def __init__(self, policy: str | None, note: Note | None = None, *, is_alone: bool = True) -> None:
        if policy is not None:
            checks.one_of("nonfinite", policy, POLICIES)
        before_the_step = policy if policy in BEFORE_THE_STEP else None
        self._own, self._policy, self._is_alone = before_the_step, before_the_step, is_alone
        self._asked, self._note, self._has_warned = policy or "warn", note, False
        self._late: tuple[int, Late] | None = None
        self.in_a_row = self.total = 0
        self._windows = self._share = self._lost = 0.0
        self._lost_in_a_row = 0
        self._skips = False

    @property
    def wants_norm(self) -> bool:
        """Whether the norm of every window's gradient is needed."""
        return self._policy is not None

    def is_void(self, norm: Tensor | None, loss: Tensor, *, scaled: bool) -> bool:
        """Return whether a window must not be applied. Reads one scalar from the device, where there is a policy.

        Args:
            scaled: gradients have a loss scale, whose scaler sees to those that overflow; the loss is looked at alone.

        Raises:
            NonFiniteError: it must not, and the policy is to stop.
        """
        if self._policy is None or norm is None:
            return False
        looked_at = ([] if scaled else [norm]) + ([loss] if self._is_alone else [])
        found = not looked_at or bool(torch.stack([torch.isfinite(each) for each in looked_at]).all())
        if not found and self._policy == "stop":
            raise _error(f"a window with loss {float(loss):g} and gradient norm {float(norm):g}")
        self._skips = not found
        return not found

    def is_no_overflow(self, loss: Tensor) -> bool:
        """Return whether a void window is so by no fault of its loss scale: the loss itself is no number."""
        return not self._skips and self._is_alone and not bool(torch.isfinite(loss))

    def note(self, loss: Tensor, *, applied: bool, has_bad_data: Callable[[], bool] = lambda: False) -> None:
        """A window is over.

        Args:
            has_bad_data: returns whether its data are to blame; asked where the loss is no number.

        Raises:
            NonFiniteError: too many in a row were skipped, or had a loss that is no number.
        """
        failed = not applied and (self._skips or self.is_no_overflow(loss))
        overflowed, self._skips = not applied and not failed, False
        looked_back = min(_LOOK_BACK, self._windows + 1)
        self._share += (float(overflowed) - self._share) / looked_back
        lost = failed and not bool(torch.isfinite(loss)) and not has_bad_data()
        self._lost += (float(lost) - self._lost) / looked_back
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        self._windows += 1
        self.total += not applied
        self.in_a_row = 0 if applied else self.in_a_row + failed
        if self.in_a_row >= PATIENCE:
            given = f"{self.in_a_row} windows in a row without a finite gradient, the last with a loss of"
            raise _error(f"{given} {float(loss):g}")

    def outlasts(self, scale: float, loss: Tensor) -> str | None:
        """Return why fp16 is to be given up after a void window, or None; without a policy, those after it are skipped.

        Raises:
            NonFiniteError: the loss is no number at any scale.
        """
        reason = None
        if scale < SCALE_FLOOR:
            if self._is_alone and not bool(torch.isfinite(loss)):
                raise _error(f"a loss of {float(loss):g}, and gradients that overflow at any loss scale")
            reason = f"gradients overflow at a loss scale of {scale:g}"
        elif self._windows >= _LOOK_BACK and self._share >= _TOO_MANY:
            reason = f"{100 * self._share:.0f}% of the last windows overflowed"
        elif self._lost_in_a_row >= _LOST_IN_A_ROW:
            reason = f"the loss of {_LOST_IN_A_ROW} windows in a row is no number: {_BEYOND}"
        elif self._windows >= _LOOK_BACK and self._lost >= _TOO_MANY_LOST:
            reason = f"the loss of {100 * self._lost:.0f}% of the last windows is no number: {_BEYOND}"
        if reason is not None:
            self._policy = self._policy or "skip"
        return reason

    @property
    def _ends_the_run(self) -> bool:
        return self._asked in ("error", "stop")

    def applied(self, step: int, loss: Tensor) -> None:
        """Look at the loss of the applied step before this one, and remember this one's.

        On a CPU this one's is looked at: it is there already.

        Raises:
            NonFiniteError: it is non-finite, and the policy is "error".
        """
        if loss.device.type == "meta" or (self._asked != "error" and (self._asked != "warn" or self._has_warned)):
            return
        before, self._late = self._late, (step, Late(loss))
        if loss.device.type == "cpu":
            before, self._late = self._late, None
        self._look_at(before)

    def over(self, error: BaseException | None = None) -> None:
        """Look at the loss of the last step, unless the run ended with an error.

        Raises:
            NonFiniteError: as of `applied`.
        """
        before, self._late = self._late, None
        self._look_at(before if error is None else None)

    def _look_at(self, before: tuple[int, Late] | None) -> None:
        if before is not None and not math.isfinite(value := before[1].read()[0]):
            self.report(f"a loss of {value:g} in step {before[0]}")

    def report(self, what: str) -> None:
        """Report that something has become non-finite: `what`, such as a parameter by its name. Warns once.

        Raises:
            NonFiniteError: the policy is "error" or "stop".
        """
        if self._asked == "continue" or (self._has_warned and not self._ends_the_run):
            return
        if self._note is not None and not self._has_warned:
            self._note("nonfinite", {"found": what, "policy": self._asked})
        self._late, self._has_warned = None, True
        if self._ends_the_run:
            raise NonFiniteError(
                "training", given=what, expected="finite values", way_out=_LATE, code="training.nonfinite"
            )
        warnings.warn(f"Training has become non-finite: {what}. {_LATE}", RuntimeWarning, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        counts = {"in_a_row": self.in_a_row, "lost_in_a_row": self._lost_in_a_row, "total": self.total}
        return counts | {"windows": self._windows, "share": self._share, "lost": self._lost, "policy": self._policy}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; a run's own policy stays. Raises `UsageError` where it is none."""
        require_keys("state.voids", state, (*_COUNTS, "windows", "share", "lost", "policy"))
        in_a_row, lost_in_a_row, total = (checks.integer(f"state.voids.{name}", state[name], low=0) for name in _COUNTS)
        windows, share, lost = (
            checks.number(f"state.voids.{name}", state[name], low=0) for name in ("windows", "share", "lost")
        )
        if state["policy"] is not None:
            checks.one_of("state.voids.policy", state["policy"], POLICIES)

        def load() -> None:
            self.in_a_row, self._lost_in_a_row, self.total = in_a_row, lost_in_a_row, total
            self._windows, self._share, self._lost = windows, share, lost
            self._policy = self._own or state["policy"]

        return load


def _error(given: str) -> NonFiniteError:
    return NonFiniteError(
        "gradient",
        given=given,
        expected="numbers",
        way_out="Look for a nan or inf in the data and for a log, a root or a division in the loss; a lower learning "
        "rate or clip_norm where training diverged. Parameters and optimizer state are as before the window.",
        code="step.nonfinite",
    )
