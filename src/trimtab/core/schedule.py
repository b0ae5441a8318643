"""Learning-rate schedules: the factor on a peak rate by progress, the paper's and those of the recipes (math.md, 5)."""

from __future__ import annotations

import math

WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1
LINEAR_FINAL = 0.01  # all the way down, but for a last step that would be none


def warmup_cosine(progress: float, warmup: float = WARMUP_FRACTION, final: float = FINAL_FRACTION) -> float:
    """Return the factor on the base learning rate: up in a straight line, then down by half a cosine.

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


def warmup_linear(progress: float, warmup: float, final: float) -> float:
    """Return the same, down in a straight line to zero at the end, and never below `final`."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    return max(final, (1 - progress) / (1 - warmup))


def factor_of(schedule: str, progress: float, warmup: float | None = None) -> float:
    """Return the factor of a plan's schedule, "warmup_cosine" or "warmup_linear".

    Args:
        warmup: share of the run that rises; None: the paper's 5%.
    """
    rises = WARMUP_FRACTION if warmup is None else warmup
    if schedule == "warmup_linear":
        return warmup_linear(progress, rises, LINEAR_FINAL)
    return warmup_cosine(progress, rises)
