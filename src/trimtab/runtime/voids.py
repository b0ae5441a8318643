"""Windows whose gradients are no numbers: skipped or stopped at, and the precision that is left when it keeps failing.

Under fp16 an overflow voids a window and lowers the loss scale, which a first few windows are for. Where the loss
itself is no number, no lower scale mends it, and the scale stays: the cause lies in data, loss or weights, or a value
of the forward is beyond fp16. Where overflows go on at the lowest scale, or losses that are no numbers go on, a wider
precision takes fp16's place; there gradients that are no numbers are skipped, as they were under fp16, and a run that
meets nothing else stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core import checks
from trimtab.core.errors import NonFiniteError
from trimtab.core.state_parts import Load, Part, require_keys

POLICIES = ("skip", "stop")
# Skipped windows in a row after which a run stops.
PATIENCE = 25
# The loss scale per mean loss below which an overflow is not one.
SCALE_FLOOR = 2.0**-4
# Of so many windows, the share that overflows when fp16 is given up; or of losses that are no numbers where the data
# are, or so many of these in a row.
_LOOK_BACK, _TOO_MANY = 64, 0.5
_TOO_MANY_LOST, _LOST_IN_A_ROW = 0.25, 8
_COUNTS = ("in_a_row", "lost_in_a_row", "total")
_BEYOND = "a value of the forward may be beyond fp16's 65504"


class Voids(Part):
    """Counts a run's void windows, and says what becomes of it.

    Args:
        policy: None, "skip" or "stop".
        is_alone: whether the loss can be looked at: one of several ranks knows its own only, and they have to agree.
    """

    def __init__(self, policy: str | None, *, is_alone: bool = True) -> None:
        if policy is not None:
            checks.one_of("nonfinite", policy, POLICIES)
        self._own, self._policy, self._is_alone = policy, policy, is_alone
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
    )
