"""Learning rate of a plan: schedule, warm-up and scale of the user's rates (paper eqs. 10, 11; math: section 5).

A run multiplies the user's learning rates by `rate_factor` within the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.batch_rule import factor_of
from trimtab.core.choice import Choice, Effect, Scalar
from trimtab.core.errors import OptimizerError
from trimtab.settings.base import Setting, one_of

if TYPE_CHECKING:
    import torch

    from trimtab.plans.plan import Plan

SCHEDULES = ("user", "warmup_cosine", "warmup_linear")


class Schedule(Setting):
    """Factor on the learning rates by the progress of the training."""

    name = "schedule"
    title = "learning-rate schedule"
    default = "user"
    effect = Effect.TRAINING
    summary = "Learning-rate schedule by progress: warmup_cosine (paper eq. 10) or warmup_linear."
    values = "user (unchanged), warmup_cosine or warmup_linear"
    examples = ("warmup_cosine", "warmup_linear")
    acts_in_step = True
    trainer_decides = True

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, SCHEDULES)


class WarmupFraction(Setting):
    """Length of the warm-up."""

    name = "warmup_fraction"
    title = "warm-up"
    default = None
    effect = Effect.TRAINING
    summary = "Warm-up of the plan's schedule as a fraction of the run."
    values = "a number from 0 to 0.9, or None for 5%"
    examples = (0.5,)

    def unchanged(self) -> Choice:
        return replace(super().unchanged(), reason="5% of the run, as in the paper")

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.number(self.field, value, low=0, high=0.9)

    def is_shown(self, values: Mapping[str, Scalar]) -> bool:
        return values["schedule"] != "user"


class LearningRateScale(Setting):
    """Scale of the user's learning rates."""

    name = "learning_rate_scale"
    title = "learning rate"
    default = 1.0
    effect = Effect.TRAINING
    summary = "Factor on the user's learning rates."
    values = "a number above 0"
    examples = (1.5,)
    acts_in_step = True
    trainer_decides = True

    def check(self, value: Scalar, plan: Plan) -> None:
        validation.number(self.field, value, low=0, open_low=True)


def rate_factor(plan: Plan, progress: float | None) -> float:
    """Return the plan's factor on the user's learning rates: the plan's scale times the schedule's value.

    Args:
        progress: fraction of training completed after the current window; required if the plan has
            a schedule.
    """
    scale = float(plan.learning_rate_scale.value or 1.0)
    if plan.schedule.value == "user":
        return scale
    assert progress is not None
    rises = plan.warmup_fraction.value
    return scale * factor_of(str(plan.schedule.value), progress, None if rises is None else float(rises))


def require_rates(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptimizerError` if a plan scales learning rates and the optimizer has none."""
    follows = (
        plan.batch_rule is not None and not plan.batch_rule.only_measures and plan.batch_rule.learning_rate != "none"
    )
    scales = plan.schedule.value != "user" or plan.learning_rate_scale.value != 1.0 or follows
    if scales and any(group.get("lr") is None for group in optimizer.param_groups):
        raise rate_unset("plan.learning_rate_scale" if plan.schedule.value == "user" else "plan.schedule", optimizer)


def rate_unset(field: str, optimizer: torch.optim.Optimizer) -> OptimizerError:
    """Return the error for a plan that scales learning rates and an optimizer without learning rates."""
    return OptimizerError(
        field,
        problem=f"The plan changes the learning rate, but {type(optimizer).__name__} has lr=None and sets its own "
        f"rate.",
        got="lr=None",
        hint="Pass a learning rate to the optimizer (Adafactor: relative_step=False), or make the plan without adapt=.",
        code="optimizer.rate_unset",
    )
