"""Optimizer step within the backward pass: no gradient is held after its parameter's update.

Set by hand only. Loops that call `run.backward` and `run.step` themselves, as trainers do, may read the gradient
between the two, so they step as usual; a plan made for them would not keep its memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Scalar
from trimtab.core.errors import ValueGivenError
from trimtab.settings.base import LiveLoop, Setting, Undo, true_or_false

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan


class StepInBackward(Setting):
    """Update of each parameter as soon as its gradient is complete, in windows of one micro-batch in `train_step`."""

    name = "step_in_backward"
    default = False
    effect = Effect.BITWISE
    summary = "Update of each parameter within the backward pass, so that no gradient is held (one micro-batch)."
    values = "true or false"
    examples = (True,)
    trainer_decides = True

    def check(self, value: Scalar, plan: Plan) -> None:
        true_or_false(self, value)
        if value and (plan.splits or plan.batch_rule is not None):
            what = "adaptive batch sizes" if plan.batch_rule is not None else "several micro-batches"
            raise ValueGivenError(
                self.field,
                got=f"{value!r} with {what}",
                expected="a plan with one micro-batch of a fixed size",
                problem=f"plan.step_in_backward updates parameters in the first backward pass, but {what} compute "
                "the gradient in several passes.",
                hint="Set step_in_backward=False.",
                code="step_in_backward.splits",
            )

    def label(self, value: Scalar) -> str:
        return "step in backward" if value else ""

    def phrase(self, value: Scalar) -> str:
        return "a step within the backward pass" if value else "a step after the backward pass"

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        from trimtab.techniques.step_in_backward import require_steps_by_parameter

        require_steps_by_parameter(loop.model, loop.optimizer)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.step_in_backward import StepInBackward as Hooks

        undo: Undo = Hooks(loop.optimizer).undo
        return undo


def require_gradient_unused(plan: Plan, needs: Mapping[str, object]) -> None:
    """Raise `ValueGivenError` if the plan steps in the backward pass and an argument of the run needs the gradient.

    Args:
        needs: argument of `trimtab.start` -> true if it needs the gradient of the whole step, or repeats the step.
    """
    named = next((name for name, is_needed in needs.items() if is_needed), None)
    if plan.step_in_backward.value and named is not None:
        raise ValueGivenError(
            "plan.step_in_backward",
            got=f"True with {named}",
            expected=f"a run without {named}",
            problem=f"The plan updates parameters within the backward pass, before {named} can act on the gradient.",
            hint=f"Leave out {named}, or use a plan with step_in_backward=False.",
            code="step_in_backward.gradient_needed",
        )
