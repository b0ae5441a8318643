"""Learning rate: warm-up and cosine by progress, applied only inside the step (paper eq. 10; math: section 5)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from trimtab.core.plan import Plan

WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1


def warmup_cosine(progress: float, warmup: float = WARMUP_FRACTION, final: float = FINAL_FRACTION) -> float:
    """Return the factor on the base learning rate.

    Args:
        progress: samples consumed *after* this window over samples planned, so that the first step is not at rate 0;
            clamped to [0, 1].
        warmup: fraction of the run that rises linearly. final: factor at the end.

    Source: paper eq. 10, indexed by progress because the number of steps is unknown when k adapts.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    phase = (progress - warmup) / (1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * phase))


def rate_factor(plan: Plan, consumed_rows: int, total_samples: int | None) -> float:
    """Return the plan's factor on the user's learning rates: its scale, times its schedule's value.

    Args:
        consumed_rows: samples trained on *after* the window that is about to be applied.
        total_samples: samples of the whole run; needed when the plan has a schedule by progress.
    """
    scale = float(plan.learning_rate_scale.value or 1.0)
    if plan.schedule.value == "user":
        return scale
    assert total_samples is not None
    return scale * warmup_cosine(consumed_rows / total_samples)


@contextlib.contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply every group's learning rate while the block runs; the user's own values stand again after it.

    Left in place, the factor would compound with a scheduler that reads the rate back.
    """
    if factor == 1.0:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
