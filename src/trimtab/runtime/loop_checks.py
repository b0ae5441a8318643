"""Warnings about a loop around a run: an optimizer step of its own, windows whose batches are weighted by size."""

from __future__ import annotations

import linecache
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trimtab.core.plan import Plan
from trimtab.runtime.order import LoopOrder
from trimtab.runtime.window import Window

_TORCH, _OWN = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


class OwnStep:
    """Warns once if the loop steps the optimizer itself: parameters would be stepped twice for one window.

    Args:
        order: knows whether the run is stepping the optimizer.
    """

    def __init__(self, order: LoopOrder) -> None:
        self._order, self._has_warned = order, False

    def watch(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Watch an optimizer's steps; returns a function that ends it."""
        return optimizer.register_step_post_hook(self._stepped).remove

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._order.in_optimizer or self._has_warned:
            return
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return  # a step without gradients changes nothing
        frame = _caller()
        if frame is None or frame.f_code.co_filename.startswith(_OWN):
            return  # planning times steps by themselves
        self._has_warned = True
        name, number = frame.f_code.co_filename, frame.f_lineno
        where, line = f"{name}:{number}", linecache.getline(name, number).strip()
        is_open = self._order.window is not None
        remedy = "Call run.step() in its place" if is_open else "Remove it"
        effect = "the run does not clip, unscale or count this step" if is_open else "each window is applied twice"
        warnings.warn(
            f"optimizer.step() at {where} steps parameters that run.step() has to step: {effect}. "
            f"{remedy}{': ' + line if line else ''}",
            RuntimeWarning,
            stacklevel=3,
        )


def _caller() -> FrameType | None:
    """Return the innermost frame outside torch and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    return frame


class UnequalBatches:
    """Warns once if means over unlike numbers of terms are weighted by the samples of their batches."""

    def __init__(self, plan: Plan) -> None:
        check = plan.check
        is_found = check is not None and not check.splittable and check.relative_difference is not None
        self._is_on = is_found and check.relative_difference > check.tolerance  # type: ignore[operator,union-attr]

    def look(self, window: Window) -> None:
        """Look at a window whose loss is a mean."""
        if not self._is_on or window.has_equal_batches:
            return
        self._is_on = False
        warnings.warn(
            "A window joins batches of unequal sizes, whose losses are weighted by their samples; the plan's check "
            "found that the loss is not a mean over samples. Return trimtab.Summed(loss_sum, count), or join batches "
            "of one size.",
            RuntimeWarning,
            stacklevel=4,
        )
