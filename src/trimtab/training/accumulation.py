"""Gradient accumulation: weights of micro-batches that sum to the full-batch gradient, to rounding, and its removal.

See math, section 2, and the paper, eqs. 4, 5 and 8.

A plain loss is a mean over samples. The window's sample count n is known before the first backward pass, so the weight
of micro-batch j is `n_j / n` and no correction is needed. A token loss is `Summed`, and the window's token count n is
known only at the end: each sum is divided by a power of two `n_ref`, equal for all windows with the same number of
samples, and the gradients are multiplied once by `n_ref / n`. Division by a power of two is exact and keeps an fp16
loss scale meaningful. A window of a single micro-batch is divided by the window's own count instead. `n_ref` is
estimated from the first micro-batch and, after the first window, from that whole window, since the first micro-batch
may contain few of the tokens. Only these two estimates wait for the device, and only if counts are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core import validation
from trimtab.core.errors import LossError, OptimizerError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.losses import Count, checked_count
from trimtab.techniques.low_bit_state import drop_hidden


class WindowWeights(Stateful):
    """Loss weights of successive windows; `open` begins a window."""

    def __init__(self) -> None:
        self._kept: float | None = None  # Tokens per sample, known after the first whole window.
        self._first: float | None = None  # `n_ref` agreed between ranks, used until then.
        self._divisor: float | None = None  # `n_ref` of this window.
        self._is_whole = False
        self.open(rows=1, num_micro_batches=1)

    def open(self, rows: int, num_micro_batches: int, num_batches: int = 1) -> None:
        """Begin a window of `rows` samples.

        Args:
            num_micro_batches: micro-batches in the window.
            num_batches: planned number of loader batches; the window may have fewer.
        """
        self._keep()
        self._divisor = None if self._kept is None else power_of_two(self._kept * rows)
        self._is_whole, self._rows = False, rows
        self._num_micro_batches = num_micro_batches
        self._is_sum: bool | None = None
        self._loss: Tensor | None = None
        self._count: Count = 0

    def _keep(self) -> None:
        """Store the tokens per sample of the first completed window. Synchronises if the count is on the device."""
        if self._kept is None and self._divisor is not None and self._is_whole:
            terms = float(self._count)
            self._kept = terms / self._rows if 0 < terms < math.inf else None

    def close(self) -> None:
        """Mark the window as completed."""
        self._is_whole = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines `n_ref` of later windows, since `n_ref` affects where fp16 overflows."""
        self._keep()
        return {"terms_per_sample": self._kept, "first": self._first}

    def loading(self, state: Mapping[str, Any]) -> Load:
        names = ("terms_per_sample", "first")
        require_keys("state.weights", state, names)
        for name in names:
            if state[name] is not None:
                validation.number(f"state.weights.{name}", state[name], low=0, open_low=True)

        def load() -> None:
            self._kept, self._first = state["terms_per_sample"], state["first"]
            self._divisor, self._is_whole = None, False

        return load

    def weigh(self, loss: Tensor, count: Count | None, rows: int) -> Tensor:
        """Return the weighted scalar loss of a micro-batch of `rows` samples, to call backward on.

        `LossError` if the window mixes means and sums, or the first token count of the run is invalid.
        """
        if self._is_sum not in (None, count is not None):
            raise LossError(
                "loss",
                got="a mean for one micro-batch and trimtab.Summed for another of the same step",
                expected="the same kind of loss for every micro-batch",
                hint="Return trimtab.Summed(loss_sum, count) for every batch, or a mean for every batch.",
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
        """True if the window has a single micro-batch, so that its token count is known before backward."""
        return self._num_micro_batches == 1

    def _first_divisor(self, terms: float) -> float:
        """Return `n_ref` of a window of about `terms` tokens."""
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
        if value.dtype in (torch.float16, torch.bfloat16):  # Small values would be lost in a half-precision sum.
            value = value.float()
        elif value.is_cuda and self._loss is None:
            # A model that the user compiled with CUDA graphs overwrites this tensor in its next forward.
            value = value.clone()
        self._loss = value if self._loss is None else self._loss + value

    @property
    def is_corrected_later(self) -> bool:
        """True if gradients are divided by the window's number of terms only after its last backward."""
        return bool(self._is_sum) and self._num_micro_batches > 1

    @property
    def correction(self) -> float | Tensor:
        """Factor still to be applied to the window's gradients; the float 1.0 if there is none."""
        if not self._is_sum or self._num_micro_batches == 1 or self._divisor is None:
            return 1.0
        count = or_one(self._count)  # Double, because an integer tensor would divide in float32.
        return self._divisor / (count.double() if isinstance(count, Tensor) else count)

    @property
    def mean_loss(self) -> Tensor:
        """Mean loss per sample or token of the window so far; a detached scalar on the model's device."""
        if self._loss is None:
            return torch.tensor(math.nan)
        return self._loss / or_one(self._count) if self._is_sum else self._loss

    @property
    def share(self) -> float | Tensor:
        """Weight of this process's mean loss in the mean over ranks; 1.0 in one process."""
        return 1.0

    @property
    def divisor(self) -> float | Tensor:
        """Divisor D of the window: a micro-batch's mean loss over `n_j` terms was weighted by `n_j / D`."""
        if not self._is_sum:
            return float(self._rows)
        if self._num_micro_batches > 1 and self._divisor is not None:
            return self._divisor
        count = or_one(self._count)
        return count.double() if isinstance(count, Tensor) else float(count)

    @property
    def counted(self) -> Count | None:
        """Token count of the window; None if the loss is a mean."""
        return self._count if self._is_sum else None

    @property
    def is_sum(self) -> bool:
        """True if the loss is a `Summed`."""
        return bool(self._is_sum)

    @property
    def terms(self) -> Count:
        """Number of terms that the loss averages over: the token count of a `Summed`, else samples."""
        return self._count if self._is_sum else self._rows


def power_of_two(terms: float) -> float:
    """Return the power of two nearest to `terms`, at least 1."""
    return float(2.0 ** round(math.log2(max(1.0, terms))))


def or_one(count: Count) -> Count:
    """Return a count that is safe to divide by: 1 in place of 0, else unchanged (fractional weights included)."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def drop_gradients(optimizer: torch.optim.Optimizer, *, between_steps: bool = False) -> None:
    """Set gradients to None, like `optimizer.zero_grad(set_to_none=True)` in half the time (docs/LOG.md).

    An overridden `zero_grad` is called. `between_steps` marks the point where a loop calls `zero_grad`: if the user's
    own `zero_grad` keeps gradients there, steps add up, which raises `OptimizerError`.
    """
    drop_hidden(optimizer)
    if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        groups = optimizer.param_groups if between_steps else []
        before = [(p.grad, p.grad._version, p) for group in groups for p in group["params"] if p.grad is not None]
        takes_none = True
        try:
            optimizer.zero_grad(set_to_none=True)
        except TypeError:  # Apex's has no arguments.
            takes_none = False
            optimizer.zero_grad()
        kept = [p for grad, version, p in before if p.grad is grad and grad._version == version]
        # An in-place `grad.data.zero_()` does not change the version counter.
        if any(bool(p.grad.any()) for p in kept if p.grad is not None):
            raise OptimizerError(
                "optimizer.zero_grad",
                problem=f"{type(optimizer).__name__}.zero_grad() kept the gradients of {len(kept)} parameters, so that "
                "steps would add up.",
                got=f"gradients of {len(kept)} parameters",
                hint="Let zero_grad() remove gradients. To accumulate gradients over n batches, call "
                "run.of_batches(n).",
                code="optimizer.keeps_gradients",
            )
        if takes_none:
            return
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
