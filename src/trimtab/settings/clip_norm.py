"""Limit on the global gradient norm (paper eq. 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.choice import Choice, Effect, Scalar
from trimtab.core.errors import ValueGivenError
from trimtab.settings.base import Setting

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan


class ClipNorm(Setting):
    """Largest global norm of the gradients; larger gradients are scaled down to this norm."""

    name = "clip_norm"
    default = None
    effect = Effect.TRAINING
    summary = "Limit on the global gradient norm (paper eq. 12)."
    values = "a number above 0, or None for no limit"
    examples = (0.01,)
    acts_in_step = True
    trainer_decides = True

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.number(self.field, value, low=0, open_low=True)


def resolve_clip(plan: Plan, clip_norm: float | None) -> float | None:
    """Return the gradient norm limit of the loop or the plan.

    Raises:
        ValueGivenError: `clip_norm` is not positive, or differs from the plan's limit.
    """
    planned = plan.clip_norm.value
    if clip_norm is not None:
        validation.number("clip_norm", clip_norm, low=0, open_low=True)
        if planned is not None and planned != clip_norm:
            raise ValueGivenError(
                "clip_norm",
                got=f"{clip_norm:g}",
                expected=f"None or {planned:g}, the limit in the plan",
                hint="Leave out clip_norm, or use a plan with this limit.",
                code="clip_norm.differs_from_plan",
            )
        return clip_norm
    return None if planned is None else float(planned)


def with_own_limit(plan: Plan, clip_norm: float | None) -> Plan:
    """Return the plan with the loop's own limit in place of a limit found by a range test."""
    if clip_norm is None or not plan.clip_norm.rejected:
        return plan
    validation.number("clip_norm", clip_norm, low=0, open_low=True)
    said = f"the limit passed to trimtab.start replaces {plan.clip_norm.value:g}, which a range test found"
    return plan.having(clip_norm=Choice(float(clip_norm), said, Effect.TRAINING))
