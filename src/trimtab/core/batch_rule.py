"""How the batch may change while training, where the user freed it (`adapt="batch"`, tier F; math: section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError

POLICIES = ("fixed", "goodput", "norm_test", "variance", "paper", "throughput_per_memory")
RATE_RULES = ("auto", "linear", "sqrt", "none")
# Policies that are given the variance they aim at, in the loss's units squared: there is no value that fits all loops.
NEEDS_TARGET = ("paper", "variance")


@dataclass(frozen=True)
class BatchRule:
    """A policy for k, micro-batches per window and rank, and what follows the batch.

    Args:
        policy: "fixed": k stays, noise is only measured. "goodput": least time to a loss, by noise scale and measured
            times. "norm_test": k so that the gradient's relative error stays below `theta`. "variance": k so that its
            variance stays below `sigma2_target`. "paper": the paper's eq. 6 to the letter. "throughput_per_memory":
            its eq. 9 to the letter, over `trials`.
        k: of the first window; rounded up to whole loader batches. k_max: most micro-batches in a window.
        sigma2_target: for "paper" and "variance": the variance aimed at.
        theta: for "norm_test": most standard deviation of a window's gradient over its norm.
        allowed: for "paper": values that k is rounded up into, or () for any; the paper has (4, 8).
        learning_rate: how the rate follows the batch: "linear" (SGD), "sqrt" (Adam family), "none", or "auto", by
            optimizer.
        min_windows: windows to see before the first change.
        trials: for "throughput_per_memory": (k, rows or tokens per second, peak bytes) of each k that was tried.

    Raises:
        ValueGivenError: a value is out of range; a target is missing; goodput with the learning-rate rule "none", whose
            model of progress then does not hold.
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
        checks.one_of("batch_rule.policy", self.policy, POLICIES)
        checks.one_of("batch_rule.learning_rate", self.learning_rate, RATE_RULES)
        checks.integer("batch_rule.k_max", self.k_max)
        checks.integer("batch_rule.k", self.k, high=self.k_max)
        checks.integer("batch_rule.min_windows", self.min_windows, low=2)
        checks.number("batch_rule.theta", self.theta, low=0, open_low=True)
        for k in self.allowed:
            checks.integer("batch_rule.allowed", k, high=self.k_max)
        if self.allowed and self.policy != "paper":
            raise ValueGivenError(
                "batch_rule.allowed", given=f"{self.allowed} with {self.policy}", expected='policy "paper" with it'
            )
        self._check_trials()
        if self.sigma2_target is not None:
            checks.number("batch_rule.sigma2_target", self.sigma2_target, low=0, open_low=True)
        elif self.policy in NEEDS_TARGET:
            raise ValueGivenError(
                "batch_rule.sigma2_target",
                given="nothing",
                expected=f"the variance that {self.policy} aims at",
                way_out="A run's record shows the variance of its own gradients; or use goodput, which needs none.",
            )
        if self.policy == "goodput" and self.learning_rate == "none":
            raise ValueGivenError(
                "batch_rule.learning_rate",
                given='"none" with goodput',
                expected="a rate that follows the batch: only then is progress per sample what goodput assumes",
                way_out='Use "auto", or the policy "norm_test".',
            )

    @property
    def only_measures(self) -> bool:
        """Whether windows stay the user's own."""
        return self.policy == "fixed" and self.k == 1

    @property
    def spans_batches(self) -> bool:
        """Whether a window may be of several loader batches."""
        return not self.only_measures and self.policy != "throughput_per_memory"

    def _check_trials(self) -> None:
        for k, throughput, memory in self.trials:
            checks.integer("batch_rule.trials", k, high=self.k_max)
            checks.number("batch_rule.trials", throughput, low=0)
            checks.number("batch_rule.trials", memory, low=0, open_low=True)
        if bool(self.trials) != (self.policy == "throughput_per_memory"):
            raise ValueGivenError(
                "batch_rule.trials",
                given=f"{len(self.trials)} with {self.policy}",
                expected='at least one with the policy "throughput_per_memory", none with another',
                way_out="trimtab.profile measures throughput and peak memory of a plan.",
            )
