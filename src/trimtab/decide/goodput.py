"""Time to a loss by the rows of a window: how much a row is worth, and what the window takes (math: section 4).

k is micro-batches per window and rank, N the noise scale in rows, r the rows of one micro-batch on all ranks; a window
of x = k r / N noise scales takes k t_micro + t_fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Noise scales in a window up to which the learning rate of an optimizer that normalises may grow with its root: noise
# is what holds that rate down, and beyond it curvature is.
NOISY = 2.0


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch, the most of all ranks, and of what a window has besides them, the least of all."""

    micro_s: float
    fixed_s: float


def rows_needed(scales: float, *, normalises: bool) -> float:
    """Return the rows that a loss takes with windows of so many noise scales, in those that the smallest ones take.

    1 + x, where each batch has the learning rate that is best for it (McCandlish et al. 2018, eq. 2.7). An optimizer
    that divides by a root mean square of gradients divides by noise as long as that is most of them: a step along
    component i is as G_i / sqrt(G_i^2 + s_i^2 / B), and with a rate that follows the root of B (Malladi et al. 2022) a
    row is worth 1 / sqrt(1 + x) of one of the smallest windows'. From `NOISY` scales on as if no rate helped any more.
    """
    if not normalises:
        return 1 + scales
    return math.sqrt(1 + scales) if scales <= NOISY else (1 + scales) / math.sqrt(1 + NOISY)


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

    With n = N / r and f = t_fixed / t_micro it is k* = sqrt(n f). Where the optimizer normalises, k* = (f + sqrt(f^2 +
    8 f n)) / 2, the root of k^2 - f k = 2 f n, as long as that is no more than `NOISY` noise scales; and where k* =
    sqrt(n f) is more, that.
    """
    scales, fixed = noise_scale / rows, times.fixed_s / times.micro_s
    if not (scales and fixed):
        return 0.0
    settled = math.sqrt(scales * fixed)
    if not normalises or math.isinf(scales):
        return settled
    rising = (fixed + math.sqrt(fixed**2 + 8 * fixed * scales)) / 2
    return max(settled, min(rising, NOISY * scales))
