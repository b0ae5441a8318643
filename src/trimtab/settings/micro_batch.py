"""Micro-batch size: samples per forward and backward of a window (gradient accumulation; math: section 2).

The search over sizes is in `planner.search`, and the loop in `training.run` reads the value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.choice import Effect, Note, Scalar
from trimtab.settings.base import Setting

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile

# Up to this number of micro-batches, gradients of half-precision weights are accumulated in the dtype of the weights.
# The error that the sum adds is then that of a rounding of the result or less (docs/LOG.md).
MOST_NARROW = 8


class MicroBatch(Setting):
    """Samples per forward and backward; the default of a plan is the whole batch."""

    name = "micro_batch"
    title = "micro-batch"
    default = None
    effect = Effect.BITWISE
    summary = "Samples per forward and backward; the gradients of a window's micro-batches are accumulated."
    values = "a whole number from 1 to the batch size"
    examples = (2, 3, 1)
    is_searched = True
    value_type = int

    def check(self, value: Scalar, plan: Plan) -> None:
        validation.integer(self.field, value, high=plan.batch_size)

    def in_loop(self, profile: Profile) -> Scalar:
        return math.ceil(profile.loop.batch_size / profile.reference.accumulate)

    def refusal(self, profile: Profile) -> Note | None:
        check, accumulate = profile.check, profile.reference.accumulate
        if accumulate > 1:
            text = f"the loop accumulates {accumulate} batches of {self.in_loop(profile)} samples"
            if check.splittable:
                return Note("batch.accumulated", text)
            return Note(check.code, f"{text}; other micro-batches are not allowed: {check.reason}")
        if profile.loop.batch_size == 1 and check.code != "batch.samples_unknown":
            return Note("batch.one_sample", "the batch has a single sample")
        if not check.splittable:
            return Note(check.code, check.reason)
        if profile.over_time_budget:
            text = "smaller micro-batches were not tried: the search was over the time budget for measuring"
            return Note("search.over_time", text)
        return Note("setting.not_tried", "smaller micro-batches were not tried")

    def label(self, value: Scalar) -> str:
        return f"micro-batch {value}"

    def value_text(self, value: Scalar) -> str:
        return f"{value} samples"

    def phrase(self, value: Scalar) -> str:
        return f"micro-batch {value}"
