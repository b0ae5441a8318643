"""Time to a loss by the rows of a window: how much a row is worth, and what the window takes (math: section 4).

k is micro-batches per window and rank, N the noise scale in rows, r the rows of one micro-batch on all ranks; a window
of x = k r / N noise scales takes k t_micro + t_fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Noise scales in a window at which an optimizer that normalises needs sqrt(2) times the rows; measured.
BEND = 2.0


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch, the most of all ranks, and of what a window has besides them, the least of all."""

    micro_s: float
    fixed_s: float


def rows_needed(scales: float, *, normalises: bool) -> float:
    """Return the rows that a loss takes with windows of so many noise scales, in those that the smallest ones take.

    1 + x, where each batch has the learning rate that is best for it (McCandlish et al. 2018, eq. 2.7).

    An optimizer that divides by a root mean square of gradients, at a rate that follows the root of the batch (Malladi
    et al. 2022), takes a row's step a = 1 / sqrt(1 + x) times as long as with the smallest windows, and its noise is
    a^2 times theirs: as if the rate were a times what it was. Where that was the best for the smallest windows,
    progress is flat in it, so that nothing is lost to first order in x; and far beyond the noise windows count, not
    rows. Between the two sqrt(1 + (x / 2)^2) is an interpolation, whose 2 is measured on one model (docs/math.md,
    section 4).
    """
    return math.hypot(1.0, scales / BEND) if normalises else 1 + scales


def relative_time(k: float, noise_scale: float, rows: float, times: Times, *, normalises: bool = False) -> float:
    """Return time to a loss up to a constant: windows needed times seconds of one.

    The inverse of goodput (Qiao et al., OSDI 2021), `(1 + N / (k r)) * (k t_micro + t_fixed)`, where the optimizer does
    not normalise. Where N is infinite, windows in proportion to 1 / k.
    """
    per_window = k * times.micro_s + times.fixed_s
    if math.isinf(noise_scale):
        return per_window / k
    if noise_scale == 0:
        return per_window
    scales = k * rows / noise_scale
    return rows_needed(scales, normalises=normalises) / scales * per_window


def goodput_k(noise_scale: float, rows: float, times: Times, *, normalises: bool = False) -> float:
    """Return the k of least time to a loss.

    With n = N / r and f = t_fixed / t_micro it is k* = sqrt(n f); where the optimizer normalises, k* = cbrt(f (2 n)^2).
    """
    scales, fixed = noise_scale / rows, times.fixed_s / times.micro_s
    if not (scales and fixed):
        return 0.0
    return math.cbrt(fixed) * math.cbrt(BEND * scales) ** 2 if normalises else math.sqrt(scales * fixed)
