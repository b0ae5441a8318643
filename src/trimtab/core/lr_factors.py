"""Learning-rate schedules: factor on the peak rate by progress, from the paper and from the recipes (math.md, 5)."""

from __future__ import annotations

import math

WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1
LINEAR_FINAL = 0.01  # Zero would make the last step useless.


def warmup_cosine(progress: float, warmup: float = WARMUP_FRACTION, final: float = FINAL_FRACTION) -> float:
    """Return the learning-rate factor of a linear warm-up and a half-cosine decay.

    Args:
        progress: samples consumed *after* this window over samples planned, so that the first step has a non-zero
            rate; clamped to [0, 1].
        warmup: fraction of the run for the warm-up.
        final: factor at the end.

    Source: paper eq. 10, indexed by progress because the number of steps is unknown when k adapts.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    phase = (progress - warmup) / (1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * phase))


def warmup_linear(progress: float, warmup: float, final: float) -> float:
    """Return the learning-rate factor of a linear warm-up and a linear decay to zero, bounded below by `final`."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    return max(final, (1 - progress) / (1 - warmup))


def factor_of(schedule: str, progress: float, warmup: float | None = None) -> float:
    """Return the learning-rate factor of a plan's schedule, "warmup_cosine" or "warmup_linear".

    Args:
        warmup: fraction of the run for the warm-up; None: the paper's 5%.
    """
    rises = WARMUP_FRACTION if warmup is None else warmup
    if schedule == "warmup_linear":
        return warmup_linear(progress, rises, LINEAR_FINAL)
    return warmup_cosine(progress, rises)
