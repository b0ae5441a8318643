"""Weights that make a window's gradient equal one big batch's, to rounding (math: section 2; paper eqs. 4, 5, 8).

A bare loss is a mean over rows: the window's rows are known before its first backward, so micro-batch j is weighted
`n_j / n` and nothing has to be corrected afterwards. A token loss is `Summed`, and the window's count is
known only at its end: each sum is divided by a power of two `n_ref`, one for all windows of as many rows (exact, keeps
an fp16 loss scale meaningful), and the gradients are multiplied once by `n_ref / n`. A window of one micro-batch is
divided by its own count instead. `n_ref` comes from the first micro-batch, until the first window is known whole: it
may hold next to none of the window's terms. Nothing waits for the device, but for these two where counts are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core import checks
from trimtab.core.errors import LossError
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.losses import Count, checked_count


class WindowWeights(Part):
    """The weighting of one window after another; `open` begins a window."""

    def __init__(self) -> None:
        self._kept: float | None = None  # terms a row, once a whole window was seen
        self._first: float | None = None  # n_ref that ranks agreed upon, until then
        self._divisor: float | None = None  # of this window
        self._is_whole = False
        self.open(rows=1, num_micro_batches=1)

    def open(self, rows: int, num_micro_batches: int, num_batches: int = 1) -> None:
        """Begin a window of `rows` rows in `num_micro_batches` micro-batches, meant to be of `num_batches` batches."""
        self._keep()
        self._divisor = None if self._kept is None else power_of_two(self._kept * rows)
        self._is_whole, self._rows = False, rows
        self._num_micro_batches = num_micro_batches
        self._is_sum: bool | None = None
        self._loss: Tensor | None = None
        self._count: Count = 0

    def _keep(self) -> None:
        """Keep the terms a row of the first window that was seen whole; waits for the device where they are there."""
        if self._kept is None and self._divisor is not None and self._is_whole:
            terms = float(self._count)
            self._kept = terms / self._rows if 0 < terms < math.inf else None

    def close(self) -> None:
        """The window's step is done: it was seen whole."""
        self._is_whole = True

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the divisor of the windows to come: under fp16 another one overflows elsewhere."""
        self._keep()
        return {"terms_per_row": self._kept, "first": self._first}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        names = ("terms_per_row", "first")
        require_keys("state.weights", state, names)
        kept, first = (
            None if state[name] is None else checks.number(f"state.weights.{name}", state[name], low=0, open_low=True)
            for name in names
        )

        def load() -> None:
            self._kept, self._first = kept, first
            self._divisor, self._is_whole = None, False

        return load

    def weigh(self, loss: Tensor, count: Count | None, rows: int) -> Tensor:
        """Return the scalar to call backward on for a micro-batch of `rows` rows.

        Raises:
            LossError: the window mixes means and sums, or the first count of the run is not one.
        """
        if self._is_sum not in (None, count is not None):
            raise LossError(
                "loss",
                given="a mean for one micro-batch and Summed for another",
                expected="the same kind throughout a window",
                code="loss.kinds_mixed",
            )
        if count is not None and not self._divides_at_once and self._divisor is None:
            terms = float(checked_count(float(count))) * self._num_micro_batches
            self._divisor = self._first_divisor(terms)
        self._is_sum = count is not None
        if count is None:
            return self._weigh_mean(loss, rows)
        return self._weigh_sum(loss, count)

    @property
    def _divides_at_once(self) -> bool:
        """Whether the window's one micro-batch has all of its terms."""
        return self._num_micro_batches == 1

    def _first_divisor(self, terms: float) -> float:
        """Return `n_ref` of a window of about so many terms."""
        return power_of_two(max(float(self._rows), terms))

    def _weigh_mean(self, loss: Tensor, rows: int) -> Tensor:
        weighted = loss if self._num_micro_batches == 1 else loss * (rows / self._rows)
        self._add(weighted.detach())
        return weighted

    def _weigh_sum(self, loss: Tensor, count: Count) -> Tensor:
        self._add(loss.detach())
        self._count = count if self._num_micro_batches == 1 else self._count + count
        if self._num_micro_batches == 1 or self._divisor is None:
            return loss / or_one(count)
        return loss * (1.0 / self._divisor)

    def _add(self, value: Tensor) -> None:
        if value.dtype in (torch.float16, torch.bfloat16):  # many small ones would be lost in a sum of such
            value = value.float()
        elif value.is_cuda and self._loss is None:  # a model that its user compiled with graphs writes its next there
            value = value.clone()
        self._loss = value if self._loss is None else self._loss + value

    @property
    def correction(self) -> float | Tensor:
        """Factor still to be applied to the window's gradients; the float 1.0 when there is none."""
        if not self._is_sum or self._num_micro_batches == 1 or self._divisor is None:
            return 1.0
        count = or_one(self._count)  # in double: an integer tensor would divide in float32
        return self._divisor / (count.double() if isinstance(count, Tensor) else count)

    @property
    def mean_loss(self) -> Tensor:
        """Mean loss per term over what the window has seen; a detached scalar on the model's device."""
        if self._loss is None:
            return torch.tensor(math.nan)
        return self._loss / or_one(self._count) if self._is_sum else self._loss

    @property
    def share(self) -> float | Tensor:
        """What this process's mean loss is multiplied by, for the mean over ranks to be that of all terms."""
        return 1.0

    @property
    def divisor(self) -> float | Tensor:
        """D, where a micro-batch's mean loss over `n_j` terms was weighted by `n_j / D`."""
        if not self._is_sum:
            return float(self._rows)
        if self._num_micro_batches > 1 and self._divisor is not None:
            return self._divisor
        count = or_one(self._count)
        return count.double() if isinstance(count, Tensor) else float(count)

    @property
    def counted(self) -> Count | None:
        """The window's count; None where the loss is a mean, which counts nothing."""
        return self._count if self._is_sum else None

    @property
    def is_sum(self) -> bool:
        """Whether the window's loss counts its terms."""
        return bool(self._is_sum)

    @property
    def terms(self) -> Count:
        """What the loss averaged over: rows, or the window's count."""
        return self._count if self._is_sum else self._rows


def power_of_two(terms: float) -> float:
    """Return the power of two nearest to a number of terms, at least 1."""
    return float(2.0 ** round(math.log2(max(1.0, terms))))


def or_one(count: Count) -> Count:
    """Return a count to divide by: itself, a fraction too (weights that sum to 0.25), and 1 only in place of 0."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1
