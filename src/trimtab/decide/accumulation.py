"""How many micro-batches to accumulate, where the batch is free (paper eqs. 6, 9; math: sections 3 and 4).

k is micro-batches per window and rank, b rows per micro-batch, R ranks, N the noise scale in rows. Pure arithmetic on
figures that were measured while training; every answer comes with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab.core.batch_rule import BatchRule
from trimtab.decide.goodput import Times, goodput_k, relative_time

# k moves while the best one is faster to a loss by more than this, by goodput's model; by this factor at the most.
HYSTERESIS = 0.01
MOST = 2
# With a larger relative standard error of the squared gradient norm, k moves only as far as every noise scale asks that
# lies within so many standard errors.
MOST_ERROR = 0.25
SURE = 2.0
EPSILON = 1e-12  # paper eq. 6


@dataclass(frozen=True)
class Noise:
    """What the windows so far say of the gradient.

    Args:
        trace: S, the trace of the per-row gradient covariance. norm2: G2, the squared norm of the true gradient.
        norm2_error: standard error of `norm2`. num_windows: how many were averaged.
    """

    trace: float
    norm2: float
    norm2_error: float
    num_windows: int

    @property
    def scale(self) -> float:
        """N = S / G2 in rows (McCandlish et al. 2018, "simple"); infinite where G2 is not above zero.

        0 where S, which is unbiased, is not above zero: among batches that are all alike it is rounding.
        """
        if not self.trace > 0:
            return 0.0
        return self.trace / self.norm2 if self.norm2 > 0 else math.inf

    @property
    def relative_error(self) -> float:
        """Standard error of `norm2` over itself; infinite where that is not above zero."""
        return self.norm2_error / self.norm2 if self.norm2 > 0 else math.inf

    def grown(self, factor: float) -> Noise:
        """Return so many times as much noise, as well known."""
        return replace(self, norm2=self.norm2 / factor, norm2_error=self.norm2_error / factor)

    def at_least(self) -> Noise:
        """Return the least noise that agrees with the windows, whose scale is 0 where they say nothing."""
        norm2 = max(0.0, self.norm2) + SURE * self.norm2_error
        return replace(self, norm2=norm2 if 0 < norm2 < math.inf else math.inf, norm2_error=0.0)

    def at_most(self) -> Noise:
        """Return the most noise that agrees with the windows, whose scale is infinite where they say nothing."""
        norm2 = self.norm2 - SURE * self.norm2_error
        return replace(self, norm2=norm2 if norm2 > 0 else 0.0, norm2_error=0.0)


@dataclass(frozen=True)
class Standing:
    """What is decided upon.

    Args:
        k: micro-batches per window and rank, at present. unit: micro-batches of one loader batch: k is a multiple.
        micro_rows: b. num_ranks: R. noise, times: None while not known. normalises: whether the optimizer divides
            gradients by their size, as Adam does.
    """

    k: int
    unit: int
    micro_rows: float
    num_ranks: int = 1
    noise: Noise | None = None
    times: Times | None = None
    normalises: bool = False

    def relative_time(self, k: int, noise_scale: float) -> float:
        """Return time to a loss with so many micro-batches a window, up to a constant, at such a noise scale."""
        assert self.times is not None
        rows = self.micro_rows * self.num_ranks
        return relative_time(k, noise_scale, rows, self.times, normalises=self.normalises)


@dataclass(frozen=True)
class Decision:
    """The next window's k, and why."""

    k: int
    reason: str
    wanted: float | None = None


def decide(rule: BatchRule, standing: Standing) -> Decision:
    """Return the next k by a rule: a multiple of the unit, bounded by `k_max`, at most twice or half the present one.

    The paper's own rules jump.
    """
    if rule.policy == "fixed":
        return Decision(standing.k, "fixed")
    if rule.policy == "throughput_per_memory":
        return _best_trial(rule)
    missing = _missing(rule, standing)
    if missing is not None:
        return Decision(standing.k, f"held: {missing}")
    doubt = _doubt(rule, standing)
    if doubt is not None:
        return _decide_in_doubt(rule, standing, doubt)
    k, wanted, reason = _POLICIES[rule.policy](rule, standing)
    return Decision(k, reason if k != standing.k else f"held: {reason}", wanted)


def _decide_in_doubt(rule: BatchRule, standing: Standing, doubt: str) -> Decision:
    """Move as far as all noise asks that there can be.

    A gradient lost in its noise is what many micro-batches are for: that nobody knows how lost it is must not hold k.
    """
    assert standing.noise is not None
    policy = _POLICIES[rule.policy]
    k, wanted, reason = policy(rule, replace(standing, noise=standing.noise.at_least()))
    if k > standing.k:
        return Decision(k, f"by the least noise there can be, {reason}; {doubt}", wanted)
    k, most_wanted, reason = policy(rule, replace(standing, noise=standing.noise.at_most()))
    if k < standing.k:
        return Decision(k, f"by the most noise there can be, {reason}; {doubt}", most_wanted)
    return Decision(standing.k, f"held: {doubt}", wanted)


def most(rule: BatchRule, unit: int) -> int:
    """Return the largest k that may be chosen: `k_max` in whole loader batches, and one of them at the least."""
    return max(1, rule.k_max // unit) * unit


def throughput_per_memory(trials: Mapping[int, tuple[float, float]]) -> int:
    """Return argmax_k throughput(k) / memory(k) at one effective batch (paper eq. 9, to the letter); ties: least k.

    Args:
        trials: k -> (rows or tokens per second, peak bytes).
    """
    return max(sorted(trials), key=lambda k: trials[k][0] / trials[k][1])


def _best_trial(rule: BatchRule) -> Decision:
    best = throughput_per_memory({k: (throughput, memory) for k, throughput, memory in rule.trials})
    return Decision(best, f"of {len(rule.trials)} trials, k = {best} has the most throughput per byte", best)


def is_known_well(rule: BatchRule, noise: Noise | None) -> bool:
    """Return whether the noise is known well enough to decide upon."""
    return noise is not None and noise.num_windows >= rule.min_windows and noise.relative_error <= MOST_ERROR


def gain(rule: BatchRule, standing: Standing, base_k: int) -> float | None:
    """Return the share of time to a loss that the best k saves of another's, by goodput's model; None while unknown.

    Where the noise is not known well it is what is saved at the least, if that is worth a change.
    """
    if rule.policy != "goodput":
        return None
    if most(rule, standing.unit) == standing.unit:  # there is no other
        return 0.0
    if _missing(rule, standing) is not None:
        return None
    noise = standing.noise
    assert noise is not None
    if is_known_well(rule, noise):
        return _saved(rule, standing, noise.scale, base_k)[1]
    more, saved = _saved(rule, standing, noise.at_least().scale, base_k)
    if more > base_k and saved >= HYSTERESIS:
        return saved
    less, saved = _saved(rule, standing, noise.at_most().scale, base_k)
    return saved if less < base_k and saved >= HYSTERESIS else None


def could_save(rule: BatchRule, standing: Standing) -> float:
    """Return the share of time to a loss that the best k saves if noise is the most there can be; 0 while unknown."""
    if rule.policy != "goodput" or standing.times is None:
        return 0.0
    scale = math.inf if standing.noise is None else standing.noise.at_most().scale
    return _saved(rule, standing, scale, standing.k)[1]


def _saved(rule: BatchRule, standing: Standing, scale: float, base_k: int) -> tuple[int, float]:
    """Return the best k at a noise scale, and the share of time to a loss that it saves of another's."""
    unit = standing.unit

    def cost(k: int) -> float:
        return standing.relative_time(k, scale)

    best = min(range(unit, most(rule, unit) + 1, unit), key=cost)
    return best, 1 - cost(best) / cost(base_k)


def _missing(rule: BatchRule, standing: Standing) -> str | None:
    """Return what nothing can be decided without, or None."""
    seen = 0 if standing.noise is None else standing.noise.num_windows
    if seen < rule.min_windows:
        return f"{seen} of {rule.min_windows} windows seen"
    if rule.policy == "goodput" and standing.times is None:
        return "the time of a micro-batch is not known"
    return None


def _doubt(rule: BatchRule, standing: Standing) -> str | None:
    """Return why the noise is not known well, or None."""
    noise = standing.noise
    assert noise is not None
    if rule.policy in ("paper", "variance"):  # they need no gradient norm
        return None
    if not noise.norm2 > 0:
        return "the gradient's norm is not to be told from its noise"
    if not noise.relative_error <= MOST_ERROR:
        return (
            f"the gradient's squared norm is known to {100 * noise.relative_error:.0f}%, {100 * MOST_ERROR:.0f}% needed"
        )
    return None


def _goodput(rule: BatchRule, standing: Standing) -> tuple[int, float, str]:
    noise, times = standing.noise, standing.times
    assert noise is not None
    assert times is not None
    scale = noise.scale

    def cost(k: int) -> float:
        return standing.relative_time(k, scale)

    rows = standing.micro_rows * standing.num_ranks
    wanted = goodput_k(scale, rows, times, normalises=standing.normalises)
    unit = standing.unit
    below = max(unit, math.floor(min(wanted, most(rule, standing.unit)) / unit) * unit)
    best = min((below, min(below + unit, most(rule, standing.unit))), key=cost)
    gain = cost(standing.k) / cost(best) - 1  # of where it goes to: steps on the way may each bring less than is asked
    k = _stepped(best, standing) if gain > HYSTERESIS else standing.k
    why = f", k = {best} is {100 * gain:.2g}% faster to a loss" if k != standing.k else ""
    says = f"noise scale {scale:.3g} rows, micro-batch {times.micro_s:.3g} s, fixed {times.fixed_s:.3g} s a window"
    return k, wanted, f"{says}: k* = {wanted:.3g}{why}"


def _norm_test(rule: BatchRule, standing: Standing) -> tuple[int, float, str]:
    """k = ceil(S / (b R theta^2 G2)) (Byrd et al. 2012)."""
    noise = standing.noise
    assert noise is not None
    wanted = noise.scale / (standing.micro_rows * standing.num_ranks * rule.theta**2)
    return _rounded(rule, standing, wanted), wanted, f"norm test: k = {wanted:.3g} for theta {rule.theta:g}"


def _variance(rule: BatchRule, standing: Standing) -> tuple[int, float, str]:
    """k = ceil(sigma2 / (R sigma2_target)), sigma2 = S / b that of one micro-batch's gradient (paper eq. 7)."""
    sigma2 = _sigma2(standing)
    wanted = sigma2 / (standing.num_ranks * (rule.sigma2_target or 0.0))
    return _rounded(rule, standing, wanted), wanted, f"variance {sigma2:.3g} of a micro-batch: k = {wanted:.3g}"


def _paper(rule: BatchRule, standing: Standing) -> tuple[int, float, str]:
    """k = min(k_max, ceil(sigma2 / (sigma2_target + eps))), rounded up into `allowed` (paper eq. 6, to the letter)."""
    sigma2 = _sigma2(standing)
    wanted = sigma2 / ((rule.sigma2_target or 0.0) + EPSILON)
    k = min(rule.k_max, max(1, math.ceil(min(wanted, rule.k_max))))
    if rule.allowed:
        k = next((each for each in sorted(rule.allowed) if each >= k), max(rule.allowed))
    in_units = min(most(rule, standing.unit), -(-k // standing.unit) * standing.unit)
    return in_units, wanted, f"variance {sigma2:.3g} of a micro-batch: k = {wanted:.3g}"


def _sigma2(standing: Standing) -> float:
    assert standing.noise is not None
    return max(0.0, standing.noise.trace) / standing.micro_rows


def _rounded(rule: BatchRule, standing: Standing, wanted: float) -> int:
    """Return a k of at least what is wanted, within the bounds; the present one while a hundredth decides."""
    highest, unit = most(rule, standing.unit), standing.unit

    def whole(value: float) -> int:
        return min(highest, math.ceil(min(max(value, 1.0), float(highest)) / unit) * unit)

    if standing.k in (whole(wanted * (1 - HYSTERESIS)), whole(wanted * (1 + HYSTERESIS))):
        return standing.k
    return _stepped(whole(wanted), standing)


def _stepped(k: int, standing: Standing) -> int:
    """Return k, moved by a factor of two at the most, in whole loader batches."""
    unit = standing.unit
    least = -(-standing.k // (MOST * unit)) * unit
    return max(unit, least, min(k, MOST * standing.k))


_POLICIES: dict[str, Callable[[BatchRule, Standing], tuple[int, float, str]]] = {
    "goodput": _goodput,
    "norm_test": _norm_test,
    "variance": _variance,
    "paper": _paper,
}
