"""Optimizer step within the backward pass: gradients are freed after the update of the parameter.

Trainers, and loops with calls of `run.backward` and `run.step`, may read gradients between the calls. They step after
the backward pass, and a memory limit met by an early step would be exceeded. So planning tries the setting only for
loops that let `run.train_step` take the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Note, Scalar
from trimtab.core.errors import ValueGivenError
from trimtab.settings.base import BY_HAND, LiveLoop, Setting, Undo, true_or_false

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Candidate, Profile

SAVES = "step_in_backward.saves"  # Code of a plan's note with the predicted increase of the peak without the setting.
NOTES = (SAVES, "step_in_backward.no_gradients")  # Codes of the notes of a plan with the setting.


class StepInBackward(Setting):
    """Update of every parameter upon completion of the gradient, in `train_step` with a single micro-batch."""

    name = "step_in_backward"
    default = False
    effect = Effect.BITWISE
    summary = "Update of each parameter within the backward pass, so that no gradient is held (one micro-batch)."
    values = "true or false"
    examples = (True,)
    is_searched = True
    value_type = bool
    trainer_decides = True

    def check(self, value: Scalar, plan: Plan) -> None:
        true_or_false(self, value)
        if value and plan.batch_rule is not None:
            raise ValueGivenError(self.field, **in_parts(value, "adaptive batch sizes"))

    def refusal(self, profile: Profile) -> Note | None:
        loop, reference = profile.loop, profile.reference
        if profile.objective.memory == 0 and profile.limits(profile.budget).memory_bytes is None:
            return Note("step_in_backward.not_needed", "memory is neither limited nor weighted")
        if reference.keeps_gradients:
            text = "the loop, or its trainer, reads or changes gradients before the optimizer step"
            return Note("step_in_backward.gradient_needed", text)
        if reference.clip_norm is not None:
            return Note("step_in_backward.gradient_needed", "the loop clips the gradient of the whole step")
        if reference.accumulate > 1 or profile.adapts_batch_size:
            return Note("step_in_backward.splits", "the loop accumulates the gradients of several batches")
        if loop.bitwise_only:
            return Note("step_in_backward.hooks", loop.bitwise_only)
        if loop.by_parameter_refusal:
            return Note("step_in_backward.optimizer", loop.by_parameter_refusal)
        return None

    def candidates(self, profile: Profile, best: Candidate) -> Sequence[Scalar]:
        return (True,)

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


def in_parts(value: Scalar, what: str) -> dict[str, str]:
    """Return the texts of the error for gradients that are computed in several backward passes."""
    return {
        "got": f"{value!r} with {what}",
        "expected": "a plan with one micro-batch of a fixed size",
        "problem": f"plan.step_in_backward updates parameters in the first backward pass, but {what} compute the "
        "gradient in several passes.",
        "hint": "Set step_in_backward=False.",
        "code": "step_in_backward.splits",
    }


def with_gradient(plan: Plan, needs: Mapping[str, object]) -> Plan:
    """Return a plan whose run holds the gradient of the whole step, if an argument of the run needs the gradient.

    A value that planning chose is switched off, with a warning. The plan is returned unchanged if nothing needs the
    gradient.

    Args:
        needs: argument of `trimtab.start` -> true if the argument needs the whole gradient, or repeats the step.

    Raises:
        ValueGivenError: the value was set by hand.
    """
    named = next((name for name, is_needed in needs.items() if is_needed), None)
    if named is None or not plan.step_in_backward.value:
        return plan
    if plan.step_in_backward.code == BY_HAND:
        raise ValueGivenError(
            "plan.step_in_backward",
            got=f"True with {named}",
            expected=f"a run without {named}",
            problem=f"The plan updates parameters within the backward pass, before {named} can act on the gradient.",
            hint=f"Leave out {named}, or use a plan with step_in_backward=False.",
            code="step_in_backward.gradient_needed",
        )
    return switched_off(plan, f"{named} needs the gradient of the whole step")


def switched_off(plan: Plan, why: str) -> Plan:
    """Return a plan without a planned step within the backward pass, with a warning that names the reason."""
    choice = plan.step_in_backward
    if not choice.value or choice.code == BY_HAND:
        return plan
    reason = f"switched off, because {why}"
    more = next((f": {note.text}" for note in plan.notes if note.code == SAVES), "")
    warnings.warn(f"plan.step_in_backward is {reason}{more}.", UserWarning, stacklevel=3)
    off = replace(choice, value=False, reason=reason, changed=False, rejected=(), code="step_in_backward.switched_off")
    figures = dict.fromkeys(("predicted", "measured", "verified", "timing_noise", "stands_between"))
    return plan.having(
        step_in_backward=off, notes=tuple(note for note in plan.notes if note.code not in NOTES), front=(), **figures
    )
