"""Windows whose gradients are no numbers: skipped or stopped at, and the precision that is left when it keeps failing.

Under fp16 an overflow voids a window and lowers the loss scale, which a first few windows are for. One that goes on
at the lowest scale is not an overflow: where the loss itself is no number, the cause lies in data, loss or weights, and
the run stops; where it is one, fp16 does not fit the model, and a wider precision takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core import checks
from trimtab.core.errors import FormatError, NonFiniteError

POLICIES = ("skip", "stop")
# Voids in a row after which a run that skips them stops.
PATIENCE = 25
# The loss scale per mean loss below which an overflow is not one.
SCALE_FLOOR = 2.0**-4
# Of so many windows, the share that is void when fp16 is given up.
_LOOK_BACK, _TOO_MANY = 64, 0.5


class Voids:
    """Counts a run's void windows, and says what becomes of it. `policy`: None, "skip" or "stop"."""

    def __init__(self, policy: str | None) -> None:
        if policy is not None:
            checks.one_of("nonfinite", policy, POLICIES)
        self._policy = policy
        self.in_a_row = self.total = 0
        self._windows = self._share = 0.0

    @property
    def wants_norm(self) -> bool:
        """Whether the norm of every window's gradient is needed."""
        return self._policy is not None

    def is_void(self, norm: Tensor | None, loss: Tensor) -> bool:
        """Return whether a window must not be applied. Reads one scalar from the device, where there is a policy.

        Raises:
            NonFiniteError: it must not, and the policy is to stop.
        """
        if self._policy is None or norm is None:
            return False
        found = bool(torch.isfinite(norm) & torch.isfinite(loss))
        if not found and self._policy == "stop":
            raise _error(f"a window with loss {float(loss):g} and gradient norm {float(norm):g}")
        return not found

    def note(self, *, applied: bool) -> None:
        """A window is over.

        Raises:
            NonFiniteError: too many in a row were skipped.
        """
        self._share += (float(not applied) - self._share) / min(_LOOK_BACK, self._windows + 1)
        self._windows += 1
        self.total += not applied
        self.in_a_row = 0 if applied else self.in_a_row + 1
        if self._policy is not None and self.in_a_row >= PATIENCE:
            raise _error(f"{self.in_a_row} windows in a row without a finite gradient")

    def outlasts(self, scale: float, loss: Tensor) -> str | None:
        """Return why fp16 is to be given up after a void window, or None.

        Raises:
            NonFiniteError: the loss is no number at any scale.
        """
        if scale < SCALE_FLOOR:
            if not bool(torch.isfinite(loss)):
                raise _error(f"{self.in_a_row} windows in a row whose loss is {float(loss):g}")
            return f"gradients overflow at a loss scale of {scale:g}"
        if self._windows >= _LOOK_BACK and self._share >= _TOO_MANY:
            return f"{100 * self._share:.0f}% of the last windows overflowed"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"in_a_row": self.in_a_row, "total": self.total, "windows": self._windows, "share": self._share}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        if not isinstance(state, Mapping) or set(state) != {"in_a_row", "total", "windows", "share"}:
            raise FormatError(
                "state.voids", given=f"{state!r:.80}", expected="the keys in_a_row, total, windows, share"
            )
        in_a_row, total = (checks.integer(f"state.voids.{name}", state[name], low=0) for name in ("in_a_row", "total"))
        windows, share = (checks.number(f"state.voids.{name}", state[name], low=0) for name in ("windows", "share"))
        self.in_a_row, self.total, self._windows, self._share = in_a_row, total, windows, share


def _error(given: str) -> NonFiniteError:
    return NonFiniteError(
        "gradient",
        given=given,
        expected="numbers",
        way_out="Look for a nan or inf in the data and for a log, a root or a division in the loss; a lower learning "
        "rate or clip_norm where training diverged. Parameters and optimizer state are as before the window.",
    )
