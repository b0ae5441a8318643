"""Windows whose gradients are no numbers: skipped or stopped at, and the precision that is left when it keeps failing.

Under fp16 an overflow voids a window and lowers the loss scale, which a first few windows are for. Where the loss
itself is no number, the cause lies in data, loss or weights, and no lower scale mends it: the scale stays, and a run
that meets nothing else stops. Where overflows go on at the lowest scale, fp16 does not fit the model, and a wider
precision takes its place. There gradients that are no numbers are skipped, as they were under fp16.
"""

from __future__ import annotations

from collections.abc import Mapping
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
# Of so many windows, the share that overflows when fp16 is given up.
_LOOK_BACK, _TOO_MANY = 64, 0.5


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
        self._windows = self._share = 0.0
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

    def note(self, loss: Tensor, *, applied: bool) -> None:
        """A window is over.

        Raises:
            NonFiniteError: too many in a row were skipped, or had a loss that is no number.
        """
        failed = not applied and (self._skips or self.is_no_overflow(loss))
        overflowed, self._skips = not applied and not failed, False
        self._share += (float(overflowed) - self._share) / min(_LOOK_BACK, self._windows + 1)
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
        if reason is not None:
            self._policy = self._policy or "skip"
        return reason

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        counts = {"in_a_row": self.in_a_row, "total": self.total, "windows": self._windows, "share": self._share}
        return counts | {"policy": self._policy}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; a run's own policy stays. Raises `UsageError` where it is none."""
        require_keys("state.voids", state, ("in_a_row", "total", "windows", "share", "policy"))
        in_a_row, total = (checks.integer(f"state.voids.{name}", state[name], low=0) for name in ("in_a_row", "total"))
        windows, share = (checks.number(f"state.voids.{name}", state[name], low=0) for name in ("windows", "share"))
        if state["policy"] is not None:
            checks.one_of("state.voids.policy", state["policy"], POLICIES)

        def load() -> None:
            self.in_a_row, self.total, self._windows, self._share = in_a_row, total, windows, share
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
