"""Optimizer step within the backward pass: a parameter is updated as soon as its gradient is complete.

A gradient is freed after its update, so a step never holds the gradients of all parameters at once. Each parameter is
updated by the optimizer's own step, with the parameter as its only one, so the results are bitwise equal. Lv et al.
2023 (arXiv:2306.09782, "LOMO") fuse plain SGD into the backward pass in the same way.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from trimtab.core.errors import ModelError, OptimizerError
from trimtab.techniques.memory_format import align_gradients

# Optimizers of torch whose update of a parameter depends on nothing but this parameter, its state and its group.
_BY_PARAMETER = {
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
_active: weakref.WeakKeyDictionary[Optimizer, StepInBackward] = weakref.WeakKeyDictionary()


def refusal_of(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer cannot step within the backward pass, or ""."""
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ not in _BY_PARAMETER:
        return f"{kind.__name__} may update a parameter by the gradients of others"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer is differentiable"
    return ""


def require_steps_by_parameter(optimizer: Optimizer) -> None:
    """Raise `OptimizerError` if an optimizer cannot step within the backward pass."""
    if refusal := refusal_of(optimizer):
        raise OptimizerError(
            "plan.step_in_backward",
            problem=f"The plan steps the optimizer within the backward pass, but {refusal}.",
            hint="Use an optimizer of torch.optim such as AdamW, or a plan with step_in_backward=False.",
            code="step_in_backward.optimizer",
        )


def stepping_in(num_micro_batches: int, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """Return a context for the backward pass of a window whose optimizer step follows without the user's code between.

    Parameters are updated in it if the plan says so, the window has one micro-batch, and no hook of the optimizer's
    step may read the gradients.
    """
    hooks = _active.get(optimizer)
    if hooks is None or num_micro_batches > 1 or _is_watched(optimizer):
        return contextlib.nullcontext()
    return hooks.active()


def _is_watched(optimizer: Optimizer) -> bool:
    hooks = (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values())
    return any(hook is not align_gradients for hook in hooks)


class StepInBackward:
    """Hooks on the parameters of an optimizer that update them in the backward passes inside `active`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Without the hooks of the optimizer's step, which run once in the step at the end of the window.
        step: Any = type(optimizer).step
        self._step: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
        self._known: Any = None  # The parameter groups of `_groups`: loading a state makes new ones.
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._is_active = self._was_active = False
        self._updated: set[Tensor] = set()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._update) for p in parameters]
        _active[optimizer] = self

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Update parameters in the backward pass inside the context, whose gradients are those of a whole step."""
        groups = self._optimizer.param_groups
        if self._known is not groups:
            self._groups = {p: group for group in groups for p in group["params"]}
            self._known = groups
        self._is_active = self._was_active = True
        self._updated.clear()
        try:
            yield
        finally:
            self._is_active = False

    def _update(self, parameter: Tensor) -> None:
        if not self._is_active or parameter not in self._groups:
            return
        if parameter in self._updated:
            raise ModelError(
                "plan.step_in_backward",
                problem="The backward pass computed the gradient of a parameter in several parts, so that the "
                "parameter was updated too early. Reentrant activation checkpointing does this.",
                hint="Use torch.utils.checkpoint with use_reentrant=False, or a plan with step_in_backward=False. "
                "Build the model again: this step has changed some of its parameters.",
                code="step_in_backward.in_parts",
            )
        self._updated.add(parameter)
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**self._groups[parameter], "params": [parameter]}]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def undo(self) -> None:
        """Remove the hooks; warn if they never updated a parameter."""
        if not self._was_active:
            warnings.warn(
                "plan.step_in_backward had no effect, because no window of one micro-batch was trained by "
                "run.train_step, or because a hook of the optimizer's step may read the gradients.",
                UserWarning,
                stacklevel=2,
            )
        for hook in self._hooks:
            hook.remove()
        _active.pop(self._optimizer, None)
