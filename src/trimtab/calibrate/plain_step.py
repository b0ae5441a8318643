"""One plain optimizer step before the measurements: finds hooks of the forward and side effects of the backward."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from trimtab.calibrate.exception_text import describe
from trimtab.calibrate.gradient_equivalence import check_splitting
from trimtab.calibrate.measurement_notes import Notes
from trimtab.calibrate.step_counts import is_of_loss, require_plain_step
from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.errors import OptimizerError, TrimtabError
from trimtab.core.plan import SplitCheck
from trimtab.measure.loop_state import LoopState
from trimtab.runtime.compiled_call import is_compiled
from trimtab.runtime.hook_checks import ForwardHookCollector
from trimtab.runtime.optimizers import drop_gradients
from trimtab.runtime.out_of_memory import is_out_of_memory
from trimtab.runtime.user_hooks import GradientHook, gradient_hooks, in_words, require_plannable


def split_check_and_hooks(
    subject: TrainingLoop, precision: str, notes: Notes, start: LoopState
) -> tuple[SplitCheck, tuple[GradientHook, ...]]:
    """Return the verdict on splitting the batch, and the gradient hooks of the model and its forward.

    Splitting is refused for a model with hooks, and, with a note, if the check itself fails.

    Args:
        start: snapshot of the loop's state, restored after the step.

    Raises:
        LossError: the loop's plain forward or backward fails, or its result is not a loss.
        OptimizerError: the optimizer step fails, or the backward takes steps.
    """
    require_plannable(hooks := gradient_hooks(subject.trained))
    hooks += _hooks_of_own_step(subject, precision)
    start.restore()
    try:
        check = check_splitting(subject, precision, start)
        if hooks:
            check = replace(check, splittable=False, reason=_of_hooks(hooks), code="split.hooks")
        return check, hooks
    except Exception as error:
        if isinstance(error, TrimtabError) and not is_of_loss(error):
            raise
        require_plain_step(subject, precision)
        notes.add("splitting.not_checked", "the splitting check failed", error)
        return SplitCheck(False, f"the splitting check failed ({describe(error)})", code="split.not_checked"), hooks


def _hooks_of_own_step(subject: TrainingLoop, precision: str) -> tuple[GradientHook, ...]:
    """Run a plain step on the example batch and return the gradient hooks that the forward registered.

    The caller restores the state. The splitting check reports a failing forward or backward.

    Raises:
        OptimizerError: parameters change in the backward, the step fails, or `zero_grad` keeps gradients.
    """
    watch = ForwardHookCollector()
    try:
        with contextlib.nullcontext() if is_compiled(subject.model) else watch:
            loss, *_ = subject.loss(precision=precision)
        versions = [(name, p, p._version) for name, p in subject.trained.named_parameters()]
        loss.backward()
    except Exception:  # An error of the user's forward, which the splitting check will raise again and report.
        return ()
    if changed := [name for name, p, version in versions if p._version != version]:
        raise OptimizerError(
            "optimizer",
            got=f"{len(changed)} parameters that change in the backward",
            expected="parameters that change only in optimizer.step()",
            problem=f"The backward changes {len(changed)} parameters (the first is {changed[0]}), so planning cannot "
            "repeat a backward from the same weights.",
            hint="Update parameters in optimizer.step(), or train without planning: "
            "trimtab.start(model, optimizer, trimtab.Plan.fixed(batch_size)).",
            code="optimizer.steps_in_backward",
        )
    try:
        subject.optimizer.step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise _failed(subject, error) from error
    else:
        drop_gradients(subject.optimizer, between_steps=True)
    return tuple(watch.found)


def _of_hooks(hooks: tuple[GradientHook, ...]) -> str:
    return f"the model has {in_words(hooks)}, which would receive the gradients of micro-batches"


def _failed(subject: TrainingLoop, error: Exception) -> OptimizerError:
    return OptimizerError(
        "optimizer",
        got=describe(error),
        expected="an optimizer whose step() takes no argument",
        problem=f"{type(subject.optimizer).__name__}.step() failed after the backward ({describe(error)}).",
        hint="Run loss_fn(model, batch).backward() and optimizer.step() yourself, and correct the error. An optimizer "
        "whose step() takes a closure cannot be planned (docs/own_loop.md).",
        code="optimizer.step_failed",
    )
