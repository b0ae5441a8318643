"""Gradient noise from what windows say of it: unbiased per window, smoothed over many (paper eq. 7; math: section 3).

Micro-batch j of a window has `n_j` terms of the loss in `m_j` independent rows, and weight `w_j = n_j / n`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.core import checks
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.decide.accumulation import Noise

# Windows that an average looks back on: noise changes over hundreds of windows, and one says little. Where few of them
# are measured, a third as many measurements.
MEMORY, MOST_AGE = 100, 3


@dataclass(frozen=True)
class WindowNoise:
    """One window's unbiased estimates. Either may be negative; so may any one window's.

    Args:
        trace: S, of tr(Sigma) per row. norm2: G2, of the true gradient's squared norm.
        num: K, micro-batches. rows: M, of all of them.
    """

    trace: float
    norm2: float
    num: float
    rows: float

    @property
    def degrees(self) -> float:
        """K - 1, which S weighs by."""
        return self.num - 1

    @property
    def norm2_weight(self) -> float:
        """M^2 (K - 1) / K, which G2 weighs by.

        The inverse of its variance where it is lost in noise, which is where its error decides.
        """
        return self.rows**2 * (1 - 1 / self.num)

    @property
    def energy(self) -> float:
        """Squared norm of a micro-batch's gradient times its rows, S + G2 M / K; of estimates by partial sums, S / 2.

        Where single norms are seen it is never less.
        """
        return max(self.trace + self.norm2 * self.rows / self.num, abs(self.trace) / 2)


def window_noise(mean_norm2: float, norm2: float, spread: float, squares: float, num: float) -> WindowNoise | None:
    """Return a window's estimates from its weighted sums, or None where it says nothing: one micro-batch, or no number.

    `S = (sum w_j ||g_j||^2 - ||gbar||^2) / sum(w_j (1 - w_j) / m_j)` and `G2 = ||gbar||^2 - S sum(w_j^2 / m_j)`.

    Args:
        mean_norm2: sum w_j ||g_j||^2. norm2: ||gbar||^2. spread: sum w_j (1 - w_j) / m_j.
        squares: sum w_j^2 / m_j. num: micro-batches with terms, on all ranks.
    """
    if num < 2 or not spread > 0:
        return None
    trace = (mean_norm2 - norm2) / spread
    return found_by(trace, norm2 - trace * squares, num, 1 / squares)


def from_partial_sums(norms2: Sequence[float], rows: Sequence[float]) -> WindowNoise | None:
    """Return a window's estimates from `||S_j||^2`, `S_j = m_1 g_1 + ... + m_j g_j`, where no `||g_j||^2` can be seen.

    Two to thirteen times the standard deviation of the exact ones.

    Args:
        norms2: after each micro-batch. rows: of each.
    """
    weights = partial_sum_weights(rows)
    if weights is None or not all(map(math.isfinite, norms2)):
        return None
    trace, norm2 = (sum(w * norm for w, norm in zip(each, norms2, strict=True)) for each in weights)
    return found_by(trace, norm2, len(rows), math.fsum(rows))


def partial_sum_weights(rows: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Return what each `||S_j||^2` weighs in S, and in G2; None where a window says nothing.

    `E ||S_j||^2 / M_j = M_j ||G||^2 + tr(Sigma)` with `M_j = m_1 + ... + m_j`: a line through them has slope G2 and
    intercept S, both linear in the norms, so that those of shards add up.
    """
    sums = list(itertools.accumulate(rows))
    if len(sums) < 2 or not sums[0] > 0:
        return None
    mean = math.fsum(sums) / len(sums)
    spread = math.fsum((x - mean) ** 2 for x in sums)
    if not spread > 0:
        return None
    slope = [(x - mean) / spread for x in sums]
    intercept = [1 / len(sums) - mean * each for each in slope]
    return [w / x for w, x in zip(intercept, sums, strict=True)], [w / x for w, x in zip(slope, sums, strict=True)]


def found_by(trace: float, norm2: float, num: float, rows: float) -> WindowNoise | None:
    """Return the estimates of so many micro-batches of so many rows in all, or None where they are no numbers."""
    if not (math.isfinite(trace) and math.isfinite(norm2)):
        return None
    return WindowNoise(trace, norm2, num, rows)


class NoiseAverage(Part):
    """Smooths S and G2 apart, each by weights of its own, over the last hundred windows or so.

    Their quotient is taken of the averages: a single window's G2 may be negative, and a mean of quotients is none. G2
    of a window of k micro-batches varies like 1/k^2 where noise is all there is: by the weights of S, what was seen at
    k = 1 would keep it uncertain long after k has risen. Both are shares of the window's own energy: gradients fall by
    orders of magnitude in a run's first windows, and one that leaps would outweigh all around it. That is not unbiased:
    N comes out too large by about one over the directions that noise has, if few micro-batches are in a window (2% for
    four of four rows, where a gradient has six components). And while a run is short, what it began with fades sooner:
    a window at twice the time weighs four times as much.
    """

    _COUNTS = ("num_windows", "span")
    _AVERAGES = ("trace", "energy", "trace_share", "norm2_share", "spread")
    _FIELDS = (*_COUNTS, *_AVERAGES, "count", "weight", "norm2_weight", "norm2_weight2")

    def __init__(self, memory: int = MEMORY) -> None:
        self._keep = 1 - 1 / memory
        self.num_windows = self.span = 0  # measured ones, and all since the first of them
        self.count = self.weight = self.norm2_weight = self.norm2_weight2 = 0.0  # each fades
        self.trace = self.energy = self.trace_share = 0.0  # averages by degrees of freedom
        self.norm2_share = self.spread = 0.0  # average of G2 by its own weights, and the sum of squares around it

    def add(self, window: WindowNoise, age: int = 1) -> None:
        """Take one window in, so many after the last one that was measured."""
        age = max(age, 1) if self.num_windows else 1
        self.span += age
        keep = min(self._keep ** min(age, MOST_AGE), (1 - age / self.span) ** 2)
        self.num_windows += 1
        self.count = keep * self.count + 1
        self.weight = keep * self.weight + window.degrees
        step, unit = window.degrees / self.weight, window.energy or 1.0
        self.trace += (window.trace - self.trace) * step
        self.energy += (unit - self.energy) * step
        self.trace_share += (window.trace / unit - self.trace_share) * step
        self._add_norm2(window.norm2 / unit, window.norm2_weight, keep)

    def _add_norm2(self, share: float, weight: float, keep: float) -> None:
        self.norm2_weight = keep * self.norm2_weight + weight
        self.norm2_weight2 = keep**2 * self.norm2_weight2 + weight
        before = share - self.norm2_share
        self.norm2_share += before * weight / self.norm2_weight
        self.spread = keep * self.spread + weight * before * (share - self.norm2_share)

    @property
    def noise(self) -> Noise | None:
        """The averages, and how sure the squared norm is; None before the first window."""
        if self.num_windows == 0:
            return None
        are_known = self.trace > 0 and self.trace_share > 0
        unit = self.trace / self.trace_share if are_known else self.energy
        return Noise(self.trace, unit * self.norm2_share, unit * self._norm2_error(), self.num_windows)

    def _norm2_error(self) -> float:
        """Return the standard error of G2, whose windows vary like one over their weights."""
        left = self.count - self.norm2_weight2 / self.norm2_weight
        unit = self.spread / left if left > 1e-9 else math.inf  # the variance of a window of weight 1
        return math.sqrt(unit * self.norm2_weight2) / self.norm2_weight

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {name: getattr(self, name) for name in self._FIELDS}

    def loading(self, state: Mapping[str, float]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        require_keys("state.noise", state, self._FIELDS)
        counts = {name: checks.integer(f"state.noise.{name}", state[name], low=0) for name in self._COUNTS}
        values = {
            name: checks.number(f"state.noise.{name}", state[name]) for name in self._FIELDS if name not in counts
        }

        def load() -> None:
            for name, value in (counts | values).items():
                setattr(self, name, value)

        return load
