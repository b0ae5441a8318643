"""Accumulation of half-precision gradients in fp32, in windows of many micro-batches (math: section 2).

A sum in bf16 is rounded after every micro-batch. Up to `MOST_NARROW` micro-batches this adds less than a rounding of
the result, and gradients are accumulated in the dtype of their parameter, bitwise as in a plain loop. The error of
longer sums grows, and after some hundred micro-batches a gradient is smaller than half of the sum's last bit and lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.losses import Count
from trimtab.plans.plan import Plan
from trimtab.settings.micro_batch import MOST_NARROW
from trimtab.training.hooks import Hook
from trimtab.training.window import Window


class WideGradients(Hook):
    """Gives half-precision parameters fp32 gradients within a window, and rounds these after its last backward."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._is_on = self._is_last = False

    def window_begins(self, window: Window) -> None:
        self._is_on = window.num_micro_batches > MOST_NARROW
        if self._is_on:
            for parameter in self._parameters:
                # The user's `zero_grad` may keep zeros, and torch refuses a new `grad_dtype` then.
                parameter.grad = None
                parameter.grad_dtype = torch.float32

    def micro_batch_begins(self, rows: int, *, of_next: bool, last: bool) -> None:
        self._is_last = last

    def backward_ends(self, rows: int, terms: Count) -> None:
        if self._is_on and self._is_last:
            self._round()

    def window_dropped(self) -> None:
        if self._is_on:
            self._round()

    def _round(self) -> None:
        self._is_on = False
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None  # torch refuses a new `grad_dtype` while there is one.
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


def wide_gradients(optimizer: torch.optim.Optimizer, plan: Plan) -> WideGradients | None:
    """Return the hook; None without half-precision parameters, or if the user's own loop has the same split."""
    if plan.splits_as_the_loop or not hasattr(Tensor, "grad_dtype"):  # Added in torch 2.10.
        return None
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    # A user may have chosen another `grad_dtype`.
    half = [p for p in trained if p.dtype.itemsize < torch.float32.itemsize and p.grad_dtype == p.dtype]
    return WideGradients(half) if half else None
