"""Statistics of paired ratios (math: section 8): t intervals of means, and rank intervals of medians, of log ratios."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimtab.core import validation

# Interleaving order of timed candidates, round by round.

T = TypeVar("T")


def turns(arms: Sequence[T], lap: int, seed: int, last: T | None = None) -> list[T]:
    """Return the candidates in the order of a round; the candidate `last` is not first.

    Rows of a balanced Latin square (Williams 1949: 0, 1, n-1, 2, n-2, ... and rotations): every candidate follows every
    candidate once. Rounds alternate forwards and backwards, to share drift. The starting candidate depends on the seed
    and the round, and moves in the opposite direction in backward rounds, to balance the pairs between rounds too.
    """
    count, pair = len(arms), lap // 2
    start = seed + (-pair - 1 if lap % 2 else pair)
    zigzag = ((i + 1) // 2 if i % 2 else -(i // 2) for i in range(count))  # 0, 1, -1, 2, -2, ...
    order = [arms[(start + step) % count] for step in zigzag]
    if lap % 2:
        order.reverse()
    return [*order[1:], order[0]] if count > 1 and order[0] is last else order


def drawn_turns(arms: Sequence[T], lap: int, draw: random.Random, last: T | None = None) -> list[T]:
    """Return the candidates in a random order; the candidate `last` is not first.

    For few rounds of few candidates, too few for a balanced Latin square: random order turns the remaining bias into
    noise. Two candidates alternate forwards and backwards, and follow themselves equally often.
    """
    order = list(arms)
    if len(order) < 3:
        return order if lap % 2 == 0 else order[::-1]
    draw.shuffle(order)
    while order[0] is last:
        draw.shuffle(order)
    return order


MIN_PAIRS_FOR_VERDICT = 5


@dataclass(frozen=True)
class Interval:
    """Mean with its 95% interval; the interval is infinite for fewer than two values."""

    mean: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        validation.not_negative(self, "n")

    @property
    def inverse(self) -> Interval:
        """The interval of the inverse of a positive ratio."""
        low, high = (math.inf if end <= 0 else 1 / end for end in (self.high, self.low))
        return Interval(1 / self.mean, low, high, self.n)


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Return `exp(m +- t(n-1, .975) * s / sqrt(n))` on log ratios."""
    logs = mean_interval([math.log(ratio) for ratio in ratios])
    return Interval(math.exp(logs.mean), _exp(logs.low), _exp(logs.high), logs.n)


_FEWEST_FOR_RANKS = 6  # Of fewer pairs, the smallest and largest ratio enclose the median with less than 95 %.


def rank_interval(ratios: Sequence[float]) -> Interval:
    """Return the Hodges-Lehmann estimate of paired ratios with the 95% interval of Wilcoxon's signed-rank test.

    The estimate is the median of the means of all pairs of log ratios. Other work on a machine adds time to single
    samples of either arm, so log ratios are distributed symmetrically but not normally: the interval keeps its coverage
    for every symmetric distribution, and a few disturbed samples do not widen it. Of fewer than six pairs, which have
    no such interval, `ratio_interval`.

    Source: Hodges and Lehmann, "Estimates of location based on rank tests" (1963).
    """
    n = len(ratios)
    if n < _FEWEST_FOR_RANKS:
        return ratio_interval(ratios)
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n))
    rank = _signed_rank(n)
    return Interval(math.exp(statistics.median(means)), _exp(means[rank - 1]), _exp(means[-rank]), n)


@functools.cache
def _signed_rank(n: int) -> int:
    """Return the rank of the interval's ends among the means, from either side: the largest k with P(W < k) <= 0.025.

    W is the sum of the signed ranks of n symmetrically distributed values.
    """
    counts = [1]  # Number of subsets of the ranks 1 to n by their sum.
    for rank in range(1, n + 1):
        longer = counts + [0] * rank
        for total, count in enumerate(counts):
            longer[total + rank] += count
        counts = longer
    below, rank = 0, 0
    while below + counts[rank] <= 0.025 * 2**n:
        below += counts[rank]
        rank += 1
    return rank


def mean_interval(values: Sequence[float]) -> Interval:
    """Return `m +- t(n-1, .975) * s / sqrt(n)`."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile(0.975, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def share_interval(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """Return `mean(parts) / mean(wholes)` with Fieller's 95% interval; infinite if the mean of wholes may be 0.

    Means are additive, so the shares of a whole's parts sum to 1. A mean of `part / whole` is not additive, and
    unstable for wholes near 0.

    Source: Fieller, "Some problems in interval estimation" (1954): the shares r at which `part - r whole` does not
    differ significantly from 0.
    """
    n = len(wholes)
    part, whole = math.fsum(parts) / n, math.fsum(wholes) / n
    if n < 2:
        return Interval(part / whole, -math.inf, math.inf, n)
    step = t_quantile(0.975, n - 1) ** 2 / (n * (n - 1))

    def spread(ours: Sequence[float], theirs: Sequence[float], mean: float, other: float) -> float:
        return step * math.fsum((a - mean) * (b - other) for a, b in zip(ours, theirs, strict=True))

    a = whole**2 - spread(wholes, wholes, whole, whole)
    b = part * whole - spread(parts, wholes, part, whole)
    c = part**2 - spread(parts, parts, part, part)
    if a <= 0:
        return Interval(part / whole, -math.inf, math.inf, n)
    root = math.sqrt(max(0.0, b**2 - a * c))
    return Interval(part / whole, (b - root) / a, (b + root) / a, n)


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Return theirs / ours per pair: above 1 if ours took less."""
    return tuple(b / a for a, b in zip(ours, theirs, strict=False))


def is_gain(effect: Interval, control: Interval | None) -> bool:
    """Return True if a ratio of at least 5 pairs is significantly above 1 and above the control's resolution."""
    return effect.n >= MIN_PAIRS_FOR_VERDICT and effect.low > 1 and effect.mean - 1 > resolution(control)


def resolution(control: Interval | None) -> float:
    """Return the smallest relative effect that the A/A control resolves: the larger distance of an interval end from 1.

    Infinite without a control, or if the control failed.
    """
    if control is None or control.low <= 0:
        return math.inf
    return max(control.high, 1 / control.low) - 1


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile (probability >= 0.5) of Student's t distribution, by bisection of its exact CDF."""
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t) for t >= 0 by the finite series for whole degrees of freedom (Abramowitz & Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    if degrees % 2:
        term, series = cosine, 0.0
        for i in range(1, degrees - 1, 2):
            series += term
            term *= cosine**2 * (i + 1) / (i + 2)
        return 0.5 + (angle + sine * series) / math.pi
    term, series = 1.0, 0.0
    for i in range(0, degrees, 2):
        series += term
        term *= cosine**2 * (i + 1) / (i + 2)
    return 0.5 + sine * series / 2


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
