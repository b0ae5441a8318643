"""Goodput: time to reach a loss as a function of the batch size (math: section 4).

k is the number of micro-batches per step and rank, N the gradient noise scale in samples, r the samples of a
micro-batch over all ranks. A step of x = k r / N noise scales takes k t_micro + t_fixed seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Batch sizes, in noise scales, at which a loss takes twice the samples with a learning rate proportional to the batch,
# and sqrt(2) times with a square-root rule; measured (docs/math.md, section 4).
DOUBLED, BENT = 2.0, 1.5


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a micro-batch (maximum over ranks), and of the fixed part of a step (minimum over ranks)."""

    micro_s: float
    fixed_s: float


def rows_needed(scales: float, *, normalises: bool) -> float:
    """Return the samples needed to reach a loss, relative to the smallest batch.

    1 + x if every batch size has the learning rate with the best next step (McCandlish et al. 2018, eq. 2.7). A rate
    that is best in the long run is lower, so larger batches lose less: 1 + x / 2 lies between the measurements.

    For an optimizer that divides by the root mean square of gradients, with a square-root learning rate rule (Malladi
    et al. 2022), a sample's step is a = 1 / sqrt(1 + x) times as long as with the smallest batch, and its noise a^2
    times as large, as if the learning rate were scaled by a. At the optimal learning rate, progress does not change to
    first order in x. Far beyond the noise scale, the number of steps counts, not of samples. sqrt(1 + (x / 1.5)^2)
    joins both limits and lies between the measurements.

    Args:
        scales: x, batch size in noise scales.
        normalises: the optimizer divides gradients by their size.
    """
    return math.hypot(1.0, scales / BENT) if normalises else 1 + scales / DOUBLED


def relative_time(k: float, noise_scale: float, rows: float, times: StepTimes, *, normalises: bool = False) -> float:
    """Return the time to reach a loss up to a constant: number of steps times seconds per step.

    The inverse of goodput (Qiao et al., OSDI 2021), which uses `1 + x` for the samples needed. For infinite N, the
    number of steps is proportional to 1 / k.

    Args:
        k: micro-batches per step and rank.
        noise_scale: N in samples.
        rows: r, samples of a micro-batch over all ranks.
        times: step time model.
        normalises: the optimizer divides gradients by their size.
    """
    per_window = k * times.micro_s + times.fixed_s
    if math.isinf(noise_scale):
        return per_window / k
    if noise_scale == 0:
        return per_window
    scales = k * rows / noise_scale
    return rows_needed(scales, normalises=normalises) / scales * per_window


def goodput_k(noise_scale: float, rows: float, times: StepTimes, *, normalises: bool = False) -> float:
    """Return the k with the least time to reach a loss.

    With n = N / r and f = t_fixed / t_micro: sqrt(2 n f); for normalising optimizers cbrt((1.5 n)^2 f).
    """
    scales, fixed = noise_scale / rows, times.fixed_s / times.micro_s
    if not (scales and fixed):
        return 0.0
    if normalises:
        return math.cbrt(fixed) * math.cbrt(BENT * scales) ** 2
    return math.sqrt(DOUBLED * scales * fixed)
