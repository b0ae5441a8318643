"""Optimizer step within the backward pass: gradients are freed after the update of the parameter.

Set by hand only. Trainers, and loops with calls of `run.backward` and `run.step`, may read gradients between the calls.
They step after the backward pass, and a memory limit met by an early step would be exceeded.
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
    """Update of every parameter upon completion of the gradient, in `train_step` with a single micro-batch."""

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
        from trimtab.techniques.optimizer_in_backward import require_steps_by_parameter

        require_steps_by_parameter(loop.model, loop.optimizer)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.optimizer_in_backward import StepInBackward as Hooks

        undo: Undo = Hooks(loop.optimizer).undo
        return undo


def require_gradient_unused(plan: Plan, needs: Mapping[str, object]) -> None:
    """Raise `ValueGivenError` if the plan steps in the backward pass and a run's argument needs the gradient.

    Args:
        needs: argument of `trimtab.start` -> true if the argument needs the whole gradient, or repeats the step.
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
