"""Policies for the number of accumulated micro-batches k, if the batch size may be tuned (paper eqs. 6 and 9).

k is the number of micro-batches per step and rank, b the samples per micro-batch, R the world size and N the gradient
noise scale in samples. Pure arithmetic on figures measured during training; each decision has a reason (math:
sections 3 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab.adaptive_batch.step_time_model import StepTimes, goodput_k, relative_time
from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import Note

# k changes if the best k reaches a loss faster by HYSTERESIS in the goodput model, and by a factor of MOST at a time.
HYSTERESIS = 0.01
MOST = 2
# If the relative standard error of the squared gradient norm is larger, k moves only in the direction on which every
# noise scale within SURE standard errors agrees.
MOST_ERROR = 0.25
SURE = 2.0
EPSILON = 1e-12  # paper eq. 6


@dataclass(frozen=True)
class NoiseEstimate:
    """Estimate of gradient noise from the steps so far.

    Args:
        trace: S, trace of the per-sample gradient covariance.
        norm2: G2, squared norm of the true gradient.
    """

    trace: float
    norm2: float
    norm2_error: float
    num_windows: int

    @property
    def scale(self) -> float:
        """Gradient noise scale N = S / G2 in samples (McCandlish et al. 2018, "simple"); infinite if G2 <= 0.

        0 if the unbiased estimate S is not positive, which is rounding in batches of equal samples.
        """
        if not self.trace > 0:
            return 0.0
        return self.trace / self.norm2 if self.norm2 > 0 else math.inf

    @property
    def relative_error(self) -> float:
        """Standard error of `norm2` divided by `norm2`; infinite if `norm2` <= 0."""
        return self.norm2_error / self.norm2 if self.norm2 > 0 else math.inf

    def grown(self, factor: float) -> NoiseEstimate:
        """Return the estimate with its noise scale multiplied by a factor and the same relative error."""
        return replace(self, norm2=self.norm2 / factor, norm2_error=self.norm2_error / factor)

    def at_least(self) -> NoiseEstimate:
        """Return the smallest noise that agrees with the steps; the scale is 0 if the norm is unknown."""
        norm2 = max(0.0, self.norm2) + SURE * self.norm2_error
        return replace(self, norm2=norm2 if 0 < norm2 < math.inf else math.inf, norm2_error=0.0)

    def at_most(self) -> NoiseEstimate:
        """Return the largest noise that agrees with the steps; the scale is infinite if the norm is unknown."""
        norm2 = self.norm2 - SURE * self.norm2_error
        return replace(self, norm2=norm2 if norm2 > 0 else 0.0, norm2_error=0.0)


@dataclass(frozen=True)
class PolicyInput:
    """Input of a decision: the current k, the layout of batches, and the estimates.

    Args:
        unit: micro-batches per loader batch; k is a multiple.
        micro_batch_samples: b, samples per micro-batch.
        num_ranks: R, world size.
        normalises: the optimizer divides gradients by their size, as Adam does.
    """

    k: int
    unit: int
    micro_batch_samples: float
    num_ranks: int = 1
    noise: NoiseEstimate | None = None
    times: StepTimes | None = None
    normalises: bool = False

    def relative_time(self, k: int, noise_scale: float) -> float:
        """Return the time to reach a loss with k micro-batches per step at a noise scale, up to a constant factor."""
        assert self.times is not None
        rows = self.micro_batch_samples * self.num_ranks
        return relative_time(k, noise_scale, rows, self.times, normalises=self.normalises)


@dataclass(frozen=True)
class BatchSizeDecision:
    """Decision on the next step.

    Args:
        wanted: unrounded k; None if it was not computed.
        code: stable identifier of the reason, such as "k.optimal" or "noise.unknown".
    """

    k: int
    reason: str
    wanted: float | None = None
    code: str = "k.optimal"


def decide(rule: BatchRule, standing: PolicyInput) -> BatchSizeDecision:
    """Return the next k by the rule's policy: a multiple of `unit` and at most `k_max`.

    The policies "goodput", "norm_test" and "variance" at most double or halve k. The paper's policies may jump.
    """
    if rule.policy == "fixed":
        return BatchSizeDecision(standing.k, "constant k", code="k.fixed")
    if rule.policy == "throughput_per_memory":
        best = throughput_per_memory({k: (throughput, memory) for k, throughput, memory in rule.trials})
        reason = f"k = {best} has the highest throughput per byte of {len(rule.trials)} trials"
        return BatchSizeDecision(best, reason, best, "k.best_trial")
    missing = _missing(rule, standing)
    if missing is not None:
        return BatchSizeDecision(standing.k, f"unchanged: {missing.text}", code=missing.code)
    doubt = _doubt(rule, standing)
    if doubt is not None:
        return _decide_in_doubt(rule, standing, doubt)
    k, wanted, reason = _POLICIES[rule.policy](rule, standing)
    return BatchSizeDecision(k, reason if k != standing.k else f"unchanged: {reason}", wanted)


def _decide_in_doubt(rule: BatchRule, standing: PolicyInput, doubt: Note) -> BatchSizeDecision:
    """Move k only in the direction on which all plausible noise scales agree: much noise needs a large k."""
    assert standing.noise is not None
    policy = _POLICIES[rule.policy]
    k, wanted, reason = policy(rule, replace(standing, noise=standing.noise.at_least()))
    if k > standing.k:
        text = f"with the smallest plausible noise scale: {reason}; {doubt.text}"
        return BatchSizeDecision(k, text, wanted, "noise.at_least")
    k, most_wanted, reason = policy(rule, replace(standing, noise=standing.noise.at_most()))
    if k < standing.k:
        text = f"with the largest plausible noise scale: {reason}; {doubt.text}"
        return BatchSizeDecision(k, text, most_wanted, "noise.at_most")
    return BatchSizeDecision(standing.k, f"unchanged: {doubt.text}", wanted, doubt.code)


def largest_k(rule: BatchRule, unit: int) -> int:
    """Return the largest allowed k: `k_max` in whole loader batches, at least one."""
    return max(1, rule.k_max // unit) * unit


def throughput_per_memory(trials: Mapping[int, tuple[float, float]]) -> int:
    """Return argmax_k throughput(k) / memory(k), of k -> (samples or tokens per second, peak bytes); ties: the least k.

    Source: paper eq. 9, exactly, at one effective batch size.
    """
    return max(sorted(trials), key=lambda k: trials[k][0] / trials[k][1])


def is_known_well(rule: BatchRule, noise: NoiseEstimate | None) -> bool:
    """Return True if the noise estimate is precise enough for a decision."""
    return noise is not None and noise.num_windows >= rule.min_windows and noise.relative_error <= MOST_ERROR


def gain(rule: BatchRule, standing: PolicyInput, base_k: int) -> float | None:
    """Return the fraction of the time to a loss that the best number of micro-batches k saves compared with `base_k`.

    The time is the number of steps, which falls with k by the gradient noise scale, times the seconds per step.

    None while unknown. If the noise estimate is imprecise, the lower bound of the saving, provided the bound justifies
    a change.
    """
    if rule.policy != "goodput":
        return None
    if largest_k(rule, standing.unit) == standing.unit:  # there is no alternative
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


def could_save(rule: BatchRule, standing: PolicyInput) -> float:
    """Return the fraction of time to a loss that the best k saves at the largest plausible noise; 0 while unknown."""
    if rule.policy != "goodput" or standing.times is None:
        return 0.0
    scale = math.inf if standing.noise is None else standing.noise.at_most().scale
    return _saved(rule, standing, scale, standing.k)[1]


def _saved(rule: BatchRule, standing: PolicyInput, scale: float, base_k: int) -> tuple[int, float]:
    """Return the best k at a noise scale, and the fraction of time to a loss that it saves compared with `base_k`."""
    units = range(standing.unit, largest_k(rule, standing.unit) + 1, standing.unit)
    best = min(units, key=lambda k: standing.relative_time(k, scale))
    return best, 1 - standing.relative_time(best, scale) / standing.relative_time(base_k, scale)


def _missing(rule: BatchRule, standing: PolicyInput) -> Note | None:
    """Return the missing input of a decision, or None."""
    seen = 0 if standing.noise is None else standing.noise.num_windows
    if seen < rule.min_windows:
        return Note("noise.too_few_steps", f"{seen} of {rule.min_windows} steps measured")
    if rule.policy == "goodput" and standing.times is None:
        return Note("time.unknown", "the time of a micro-batch is unknown")
    return None


def _doubt(rule: BatchRule, standing: PolicyInput) -> Note | None:
    """Return the reason why the noise estimate is too imprecise, or None."""
    noise = standing.noise
    assert noise is not None
    if rule.policy in ("paper", "variance"):  # These policies need no gradient norm.
        return None
    if not noise.norm2 > 0:
        return Note("noise.norm_unknown", "the squared gradient norm is not significantly above zero")
    if not noise.relative_error <= MOST_ERROR:
        error = f"a relative standard error of {100 * noise.relative_error:.0f}%, above {100 * MOST_ERROR:.0f}%"
        return Note("noise.imprecise", f"the squared gradient norm has {error}")
    return None


def _goodput(rule: BatchRule, standing: PolicyInput) -> tuple[int, float, str]:
    noise, times = standing.noise, standing.times
    assert noise is not None
    assert times is not None
    rows = standing.micro_batch_samples * standing.num_ranks
    wanted = goodput_k(noise.scale, rows, times, normalises=standing.normalises)
    best, saved = _saved(rule, standing, noise.scale, standing.k)
    # The gain is measured at the final k, because each step on the way may gain less than the hysteresis.
    gain = saved / (1 - saved)
    k = _stepped(best, standing) if gain > HYSTERESIS else standing.k
    why = f"; k = {best} reaches a loss {100 * gain:.2g}% faster" if k != standing.k else ""
    seconds = f"{times.micro_s:.3g} s per micro-batch, {times.fixed_s:.3g} s fixed per step"
    return k, wanted, f"noise scale {noise.scale:.3g} samples, {seconds}: optimal k = {wanted:.3g}{why}"


def _norm_test(rule: BatchRule, standing: PolicyInput) -> tuple[int, float, str]:
    """k = ceil(S / (b R theta^2 G2)) (Byrd et al. 2012)."""
    noise = standing.noise
    assert noise is not None
    wanted = noise.scale / (standing.micro_batch_samples * standing.num_ranks * rule.theta**2)
    return _rounded(rule, standing, wanted), wanted, f"norm test with theta {rule.theta:g}: k = {wanted:.3g}"


def _variance(rule: BatchRule, standing: PolicyInput) -> tuple[int, float, str]:
    """Return k = ceil(sigma2 / (R sigma2_target)) with sigma2 = S / b, the variance per micro-batch (paper eq. 7)."""
    sigma2 = _sigma2(standing)
    wanted = sigma2 / (standing.num_ranks * (rule.sigma2_target or 0.0))
    return _rounded(rule, standing, wanted), wanted, f"gradient variance {sigma2:.3g} per micro-batch: k = {wanted:.3g}"


def _paper(rule: BatchRule, standing: PolicyInput) -> tuple[int, float, str]:
    """k = min(k_max, ceil(sigma2 / (sigma2_target + eps))), rounded up into `allowed` (paper eq. 6, exactly)."""
    sigma2 = _sigma2(standing)
    wanted = sigma2 / ((rule.sigma2_target or 0.0) + EPSILON)
    k = min(rule.k_max, max(1, math.ceil(min(wanted, rule.k_max))))
    if rule.allowed:
        k = next((each for each in sorted(rule.allowed) if each >= k), max(rule.allowed))
    in_units = min(largest_k(rule, standing.unit), -(-k // standing.unit) * standing.unit)
    return in_units, wanted, f"gradient variance {sigma2:.3g} per micro-batch: k = {wanted:.3g}"


def _sigma2(standing: PolicyInput) -> float:
    assert standing.noise is not None
    return max(0.0, standing.noise.trace) / standing.micro_batch_samples


def _rounded(rule: BatchRule, standing: PolicyInput, wanted: float) -> int:
    """Return `wanted` rounded up within bounds; the current k if a 1 % smaller or larger value rounds to it."""
    highest, unit = largest_k(rule, standing.unit), standing.unit

    def whole(value: float) -> int:
        return min(highest, math.ceil(min(max(value, 1.0), float(highest)) / unit) * unit)

    if standing.k in (whole(wanted * (1 - HYSTERESIS)), whole(wanted * (1 + HYSTERESIS))):
        return standing.k
    return _stepped(whole(wanted), standing)


def _stepped(k: int, standing: PolicyInput) -> int:
    """Return k in whole loader batches, limited to a factor of two from the current k."""
    unit = standing.unit
    least = -(-standing.k // (MOST * unit)) * unit
    return max(unit, least, min(k, MOST * standing.k))


_POLICIES: dict[str, Callable[[BatchRule, PolicyInput], tuple[int, float, str]]] = {
    "goodput": _goodput,
    "norm_test": _norm_test,
    "variance": _variance,
    "paper": _paper,
}
