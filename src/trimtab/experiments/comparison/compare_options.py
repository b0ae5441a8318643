"""Validated options of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.paired_runs.peer_arms import usual_peers
from trimtab.tasks.task import Task

# Training settings that a tuned plan may change by default.
USUAL_ADAPT = ("learning_rate",)


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison.

    Args:
        num_pairs: paired runs, a seed each; 5 for a verdict, 8 for a claim.
        whole_pairs: number of full runs to the end of the budget (None: all). The remaining runs take a few steps per
            arm, enough for throughput at a tenth of the cost.
        quick: short arms, and at least one pair but no more than fit in about two minutes including planning.
        adapt: training settings a tuned plan may change; () runs no tuned plan.
        peers: True to run baseline recipes.
        cap_s: training seconds after which an arm is stopped (censored).
        against: names of the baseline recipes, required in the task; None for the default recipes present in the task.
        reference_cap_s: time cap of the reference, at least `cap_s`; None for the same cap. A higher cap lets a slow
            reference reach the target without delaying the stop of the remaining arms.
    """

    num_pairs: int = 5
    whole_pairs: int | None = None
    quick: bool = False
    adapt: tuple[str, ...] = USUAL_ADAPT
    peers: bool = True
    cap_s: float = math.inf
    against: tuple[str, ...] | None = None
    reference_cap_s: float | None = None

    def __post_init__(self) -> None:
        validation.integer("pairs", self.num_pairs, high=1000)
        if self.whole_pairs is not None:
            validation.integer("whole", self.whole_pairs, low=0, high=self.num_pairs)
        if self.quick and (self.whole_pairs != 0 or self.adapt or self.peers):
            raise ValueGivenError(
                "quick",
                problem="--quick measures only throughput and memory of the equivalent plan, and cannot be combined "
                "with --whole, --adapt or --peers.",
                hint="Remove --quick, or the other options.",
                code="option.conflict",
            )
        if not self.cap_s > 0:
            raise ValueGivenError("cap", got=f"{self.cap_s:g}", expected="seconds above zero", code="cap.not_positive")
        if self.reference_cap_s is not None and not self.reference_cap_s >= self.cap_s:
            raise ValueGivenError(
                "reference_cap",
                got=f"{self.reference_cap_s:g} s",
                expected=f"at least the value of --cap, {self.cap_s:g} s",
                hint="Raise --reference-cap, or remove it to use --cap for all arms.",
                code="cap.too_small",
            )

    def raced(self, task: Task) -> tuple[str, ...]:
        """Return the baseline recipes to run, by name."""
        asked = usual_peers(task) if self.against is None else self.against
        return asked if self.peers else ()
