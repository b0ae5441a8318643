"""Policy of the adaptive batch size; bounds and targets are in the plan's `batch_rule` (math: section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Scalar
from trimtab.core.errors import FormatError
from trimtab.settings.base import Setting

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan


class BatchPolicy(Setting):
    """Name of the policy in the plan's batch rule."""

    name = "batch_policy"
    title = "batch size"
    default = "user"
    effect = Effect.TRAINING
    summary = "Policy of the adaptive batch size, set together with `batch_rule`."
    values = "user (windows of one batch), or the policy of batch_rule"
    examples = ("fixed",)
    trainer_decides = True

    def check(self, value: Scalar, plan: Plan) -> None:
        policy = "user" if plan.batch_rule is None else plan.batch_rule.policy
        if value != policy:
            with_rule = f"{policy!r}, the policy of batch_rule"
            expected = with_rule if plan.batch_rule else f"{policy!r} without a batch_rule"
            raise FormatError(self.field, got=repr(value), expected=expected)
