"""Time to a loss by the rows of a window: how much a row is worth, and what the window takes (math: section 4).

k is micro-batches per window and rank, N the noise scale in rows, r the rows of one micro-batch on all ranks; a window
of x = k r / N noise scales takes k t_micro + t_fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Noise scales in a window at which a loss takes twice the rows at a rate in proportion to the batch, and sqrt(2) times
# where it follows the batch's root; measured (docs/math.md, section 4).
DOUBLED, BENT = 2.0, 1.5


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch, the most of all ranks, and of what a window has besides them, the least of all."""

    micro_s: float
    fixed_s: float


def rows_needed(scales: float, *, normalises: bool) -> float:
    """Return the rows that a loss takes with windows of so many noise scales, in those that the smallest ones take.

    1 + x where each batch has the rate by which its next step is best (McCandlish et al. 2018, eq. 2.7). A rate that is
    best in the long run is lower, and of one in proportion to the batch larger windows then take less away: 1 + x / 2
    is between what was measured.

    An optimizer that divides by a root mean square of gradients, at a rate that follows the root of the batch (Malladi
    et al. 2022), takes a row's step a = 1 / sqrt(1 + x) times as long as with the smallest windows, and its noise is
    a^2 times theirs: as if the rate were a times what it was. Where that was the best for the smallest windows,
    progress is flat in it, so that nothing is lost to first order in x; far beyond the noise windows count, not rows.
    sqrt(1 + (x / 1.5)^2) joins the two, and is between what was measured.
    """
    return math.hypot(1.0, scales / BENT) if normalises else 1 + scales / DOUBLED


def relative_time(k: float, noise_scale: float, rows: float, times: Times, *, normalises: bool = False) -> float:
    """Return time to a loss up to a constant: windows needed times seconds of one.

    The inverse of goodput (Qiao et al., OSDI 2021), which has `1 + x` for the rows that are needed. Where N is
    infinite, windows in proportion to 1 / k.
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

    With n = N / r and f = t_fixed / t_micro it is sqrt(2 n f); where the optimizer normalises, cbrt((1.5 n)^2 f).
    """
    scales, fixed = noise_scale / rows, times.fixed_s / times.micro_s
    if not (scales and fixed):
        return 0.0
    if normalises:
        return math.cbrt(fixed) * math.cbrt(BENT * scales) ** 2
    return math.sqrt(DOUBLED * scales * fixed)
