"""Adaptive batch size (`adapt="batch"`, math: section 4) and learning-rate schedules (section 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError

# Learning-rate schedules: factor on the peak rate by progress, from the paper and from the recipes (math.md, 5).

WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1
LINEAR_FINAL = 0.01  # Zero would make the last step useless.


def warmup_cosine(progress: float, warmup: float = WARMUP_FRACTION, final: float = FINAL_FRACTION) -> float:
    """Return the learning-rate factor of a linear warm-up and a half-cosine decay.

    Args:
        progress: samples consumed *after* this window over samples planned, so that the first step has a non-zero
            rate; clamped to [0, 1].

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
    """Return the learning-rate factor of a schedule, "warmup_cosine" or "warmup_linear"; warm-up None: 5%."""
    rises = WARMUP_FRACTION if warmup is None else warmup
    if schedule == "warmup_linear":
        return warmup_linear(progress, rises, LINEAR_FINAL)
    return warmup_cosine(progress, rises)


POLICIES = ("fixed", "goodput", "norm_test", "variance", "paper", "throughput_per_memory")
RATE_RULES = ("auto", "linear", "sqrt", "none")
# Policies that need a target variance, in the loss's units squared: no default fits all loops.
NEEDS_TARGET = ("paper", "variance")


@dataclass(frozen=True)
class BatchRule:
    """Policy for k, the number of micro-batches per window and rank, and for scaling the learning rate.

    Policies:

    - "fixed": constant k; the noise scale is only measured.
    - "goodput": shortest time to a given loss, from noise scale and step times.
    - "norm_test": keeps the gradient's relative standard deviation below `theta`.
    - "variance": keeps the gradient's variance below `sigma2_target`.
    - "paper": eq. 6 of the paper, to the letter.
    - "throughput_per_memory": eq. 9 of the paper, to the letter, over `trials`.

    Args:
        policy: name of the policy.
        k: k of the first window; rounded up to whole loader batches.
        k_max: largest k.
        sigma2_target: for "paper" and "variance": target variance.
        theta: for "norm_test": largest ratio of the standard deviation of a window's gradient to its norm.
        allowed: for "paper": values that k is rounded up to, or () for any; the paper has (4, 8).
        learning_rate: scaling with the batch size: "linear" (SGD), "sqrt" (Adam family), "none", or "auto" (by
            optimizer).
        min_windows: windows to observe before the first change.
        trials: for "throughput_per_memory": (k, samples or tokens per second, peak bytes) of each measured k.

    Raises:
        ValueGivenError: a value is out of range, a target is missing, or goodput is combined with the learning-rate
            rule "none", which contradicts its model of progress.
    """

    policy: str = "goodput"
    k: int = 1
    k_max: int = 16
    sigma2_target: float | None = None
    theta: float = 0.9
    allowed: tuple[int, ...] = ()
    learning_rate: str = "auto"
    min_windows: int = 10
    trials: tuple[tuple[int, float, float], ...] = ()

    def __post_init__(self) -> None:
        validation.one_of("batch_rule.policy", self.policy, POLICIES)
        validation.one_of("batch_rule.learning_rate", self.learning_rate, RATE_RULES)
        validation.integer("batch_rule.k_max", self.k_max)
        validation.integer("batch_rule.k", self.k, high=self.k_max)
        validation.integer("batch_rule.min_windows", self.min_windows, low=2)
        validation.number("batch_rule.theta", self.theta, low=0, open_low=True)
        for k in self.allowed:
            validation.integer("batch_rule.allowed", k, high=self.k_max)
        if self.allowed and self.policy != "paper":
            raise ValueGivenError(
                "batch_rule.allowed",
                got=f"{self.allowed} with policy={self.policy!r}",
                expected='() unless policy="paper"',
                hint='Leave out `allowed`, or set policy="paper".',
            )
        self._check_trials()
        if self.sigma2_target is not None:
            validation.number("batch_rule.sigma2_target", self.sigma2_target, low=0, open_low=True)
        elif self.policy in NEEDS_TARGET:
            raise ValueGivenError(
                "batch_rule.sigma2_target",
                problem=f"policy={self.policy!r} needs sigma2_target, the target variance of the gradient.",
                hint='Take it from the gradient variance in a run\'s record, or use policy="goodput".',
            )
        if self.policy == "goodput" and self.learning_rate == "none":
            raise ValueGivenError(
                "batch_rule.learning_rate",
                problem='policy="goodput" does not support learning_rate="none", because its model of progress assumes '
                "a learning rate that is scaled with the batch size.",
                hint='Set learning_rate="auto", or use policy="norm_test".',
            )

    @property
    def only_measures(self) -> bool:
        """True if the rule leaves windows unchanged."""
        return self.policy == "fixed" and self.k == 1

    @property
    def spans_batches(self) -> bool:
        """True if a window may contain several loader batches."""
        return not self.only_measures and self.policy != "throughput_per_memory"

    def _check_trials(self) -> None:
        for k, throughput, memory in self.trials:
            validation.integer("batch_rule.trials", k, high=self.k_max)
            validation.number("batch_rule.trials", throughput, low=0)
            validation.number("batch_rule.trials", memory, low=0, open_low=True)
        if bool(self.trials) != (self.policy == "throughput_per_memory"):
            raise ValueGivenError(
                "batch_rule.trials",
                got=f"{len(self.trials)} trials with policy={self.policy!r}",
                expected='at least one trial with policy="throughput_per_memory", and none with another policy',
                hint="Measure throughput and peak memory of each k with `trimtab.profile`.",
            )
