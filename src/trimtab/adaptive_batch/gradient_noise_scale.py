"""Gradient noise scale estimation: unbiased per step, averaged over many steps (paper eq. 7; math: section 3).

Micro-batch j of a step has `n_j` loss terms from `m_j` independent samples, and weight `w_j = n_j / n`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate
from trimtab.core import validation
from trimtab.core.stateful import Load, Stateful, require_keys

# Steps in the average: noise changes over hundreds of steps, and a single step is imprecise. If only few steps are
# measured, a third as many measurements.
MEMORY, MOST_AGE = 100, 3


@dataclass(frozen=True)
class WindowNoise:
    """Unbiased estimates from a single step; any of them may be negative.

    Args:
        trace: S, estimate of tr(Sigma) per sample.
        norm2: G2, estimate of the true gradient's squared norm.
        num: K, number of micro-batches.
        rows: M, samples of all micro-batches.
    """

    trace: float
    norm2: float
    num: float
    rows: float

    @property
    def degrees(self) -> float:
        """K - 1, the weight of S in averages."""
        return self.num - 1

    @property
    def norm2_weight(self) -> float:
        """M^2 (K - 1) / K, the weight of G2 in averages.

        The inverse of the variance of G2 if noise dominates; only then does its error matter.
        """
        return self.rows**2 * (1 - 1 / self.num)

    @property
    def energy(self) -> float:
        """Squared norm of a micro-batch's gradient times its samples, S + G2 M / K; at least |S| / 2.

        The lower bound matters only for estimates from partial sums.
        """
        return max(self.trace + self.norm2 * self.rows / self.num, abs(self.trace) / 2)


def window_noise(mean_norm2: float, norm2: float, spread: float, squares: float, num: float) -> WindowNoise | None:
    """Return a step's estimates from its weighted sums; None for a single micro-batch or non-finite values.

    `S = (sum w_j ||g_j||^2 - ||gbar||^2) / sum(w_j (1 - w_j) / m_j)` and `G2 = ||gbar||^2 - S sum(w_j^2 / m_j)`.

    Args:
        mean_norm2: sum w_j ||g_j||^2.
        norm2: ||gbar||^2.
        spread: sum w_j (1 - w_j) / m_j.
        squares: sum w_j^2 / m_j.
        num: micro-batches with loss terms, on all ranks.
    """
    if num < 2 or not spread > 0:
        return None
    trace = (mean_norm2 - norm2) / spread
    is_finite = math.isfinite(trace) and math.isfinite(norm2)
    return WindowNoise(trace, norm2 - trace * squares, num, 1 / squares) if is_finite else None


def from_partial_sums(norms2: Sequence[float], rows: Sequence[float]) -> WindowNoise | None:
    """Return a step's estimates from norms of partial sums, for gradients that only accumulate.

    Uses `||S_j||^2` with `S_j = m_1 g_1 + ... + m_j g_j`, of `m_j` samples (`rows`), instead of `||g_j||^2`. The
    standard deviation is 2 to 13 times that of the exact estimates.
    """
    weights = partial_sum_weights(rows)
    if weights is None or not all(map(math.isfinite, norms2)):
        return None
    trace, norm2 = (sum(w * norm for w, norm in zip(each, norms2, strict=True)) for each in weights)
    is_finite = math.isfinite(trace) and math.isfinite(norm2)
    return WindowNoise(trace, norm2, len(rows), math.fsum(rows)) if is_finite else None


def partial_sum_weights(rows: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Return the weights of `||S_j||^2` in S and in G2; None for fewer than two micro-batches.

    `E ||S_j||^2 / M_j = M_j ||G||^2 + tr(Sigma)` with `M_j = m_1 + ... + m_j`: the fitted line has slope G2 and
    intercept S. Both are linear in the norms, so estimates of shards add up.
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


class NoiseAverage(Stateful):
    """Moving averages of S and G2, with separate weights, over about the last hundred steps.

    The noise scale is the quotient of the averages, because a single step's G2 may be negative. With dominating noise,
    the variance of G2 in a step of k micro-batches is proportional to 1/k^2: the weights of S would keep estimates from
    k = 1 dominant long after k has risen. Both are averaged relative to the step's own energy, because gradients fall
    by orders of magnitude in a run's first steps and an outlier would outweigh its neighbours. The result has a small
    bias: N is too large by about one over the number of directions of the noise if a step has few micro-batches (2 %
    for four micro-batches of four samples and a gradient of six components). Early in a run, old estimates fade faster:
    a step at twice the time weighs four times as much.
    """

    _COUNTS = ("num_windows", "span")
    _AVERAGES = ("trace", "energy", "trace_share", "norm2_share", "spread")
    _FIELDS = (*_COUNTS, *_AVERAGES, "count", "weight", "norm2_weight", "norm2_weight2")

    def __init__(self, memory: int = MEMORY) -> None:
        self._keep = 1 - 1 / memory
        self.num_windows = self.span = 0  # measured steps, and all steps since the first of them
        self.count = self.weight = self.norm2_weight = self.norm2_weight2 = 0.0  # decaying sums
        self.trace = self.energy = self.trace_share = 0.0  # averages weighted by degrees of freedom
        # average of G2 with its own weights, and weighted sum of squared deviations
        self.norm2_share = self.spread = 0.0

    def add(self, window: WindowNoise, age: int = 1) -> None:
        """Add the estimates of a step, `age` steps after the last measured step."""
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
        share, weight = window.norm2 / unit, window.norm2_weight
        self.norm2_weight = keep * self.norm2_weight + weight
        self.norm2_weight2 = keep**2 * self.norm2_weight2 + weight
        before = share - self.norm2_share
        self.norm2_share += before * weight / self.norm2_weight
        self.spread = keep * self.spread + weight * before * (share - self.norm2_share)

    @property
    def noise(self) -> NoiseEstimate | None:
        """Averages, with the standard error of the squared norm; None before the first step."""
        if self.num_windows == 0:
            return None
        are_known = self.trace > 0 and self.trace_share > 0
        unit = self.trace / self.trace_share if are_known else self.energy
        # A step's variance is inversely proportional to its weight.
        left = self.count - self.norm2_weight2 / self.norm2_weight
        variance = self.spread / left if left > 1e-9 else math.inf  # of a step of weight 1
        error = math.sqrt(variance * self.norm2_weight2) / self.norm2_weight
        return NoiseEstimate(self.trace, unit * self.norm2_share, unit * error, self.num_windows)

    def state_dict(self) -> dict[str, float]:
        """Return the averages for a resumed run."""
        return {name: getattr(self, name) for name in self._FIELDS}

    def loading(self, state: Mapping[str, float]) -> Load:
        require_keys("state.noise", state, self._FIELDS)
        counts = {name: validation.integer(f"state.noise.{name}", state[name], low=0) for name in self._COUNTS}
        values = {
            name: validation.number(f"state.noise.{name}", state[name]) for name in self._FIELDS if name not in counts
        }

        def load() -> None:
            for name, value in (counts | values).items():
                setattr(self, name, value)

        return load


# Gradient noise with sharded gradients (FSDP2): a micro-batch for the estimate spans all ranks.

_OF_EACH = 3  # figures per micro-batch


def num_figures(num_micro_batches: int) -> int:
    """Return the number of figures that a rank sends per step."""
    return 1 + _OF_EACH * num_micro_batches


@dataclass(frozen=True)
class JointMicroBatches:
    """Micro-batches of a step, each over all ranks.

    Args:
        norm2: `||gbar||^2` of the whole step.
        seen: `||N_j g_j||^2` per micro-batch, or of the sum of the micro-batches so far.
        terms: `N_j`, loss terms per micro-batch.
        rows: `M_j`, samples per micro-batch.
    """

    norm2: float
    seen: Sequence[float]
    terms: Sequence[float]
    rows: Sequence[float]

    @classmethod
    def of_ranks(cls, each: Sequence[Sequence[float]]) -> JointMicroBatches:
        """Return the micro-batches from the `num_figures` figures of each rank.

        The figures are `||gbar||^2` of the local shards; `||h_j||^2 D^2` of the local shards for every j; all `n_rj`;
        and all `m_rj`.
        """
        norm2, *of_each = (sum(figures) for figures in zip(*each, strict=True))
        num = len(of_each) // _OF_EACH
        seen, terms, rows = (of_each[first : first + num] for first in range(0, len(of_each), num))
        return cls(norm2, [len(each) ** 2 * norm for norm in seen], terms, rows)

    def noise(self) -> WindowNoise | None:
        """Return the step's estimates from norms of single micro-batches; None if there is no information."""
        n = sum(self.terms)
        if not n > 0:
            return None
        shown = [one for one in zip(self.seen, self.terms, self.rows, strict=True) if one[1] != 0]
        mean_norm2 = sum(norm / terms for norm, terms, _ in shown) / n
        per_sample = sum(terms / n / rows for _, terms, rows in shown)
        squares = sum((terms / n) ** 2 / rows for _, terms, rows in shown)
        return window_noise(mean_norm2, self.norm2, per_sample - squares, squares, len(shown))

    def noise_of_sums(self) -> WindowNoise | None:
        """Return the step's estimates from norms of partial sums; None if loss terms are not samples."""
        return from_partial_sums(self.seen, self.rows) if self.terms == self.rows else None
