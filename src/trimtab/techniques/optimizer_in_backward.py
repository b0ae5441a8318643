"""Optimizer step within the backward pass: a parameter is updated upon completion of the gradient.

The gradient is then freed, so a step never holds the gradients of all parameters. The optimizer's own step runs with a
single parameter, so results are bitwise equal. Lv et al. 2023 (arXiv:2306.09782, "LOMO") fuse plain SGD into the
backward pass in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trimtab.core.errors import ModelError, OptimizerError
from trimtab.techniques.memory_format import align_gradients
from trimtab.techniques.optimizers import begin_momenta, has_own_step

# torch optimizers that update each parameter from its own gradient, state and group only.
_BY_PARAMETER = {
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
# Hooks before the step that a single parameter does not need.
_NEEDLESS = (align_gradients, begin_momenta)
_active: weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepInBackward]] = weakref.WeakKeyDictionary()


def refusal_of(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer cannot step within the backward pass, or ""."""
    kind, groups = type(optimizer), optimizer.param_groups
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ not in _BY_PARAMETER:
        return f"{kind.__name__} is not an optimizer of torch that updates each parameter independently"
    if has_own_step(optimizer):
        return "the step of the optimizer was replaced"
    if any(group.get("differentiable") for group in groups):
        return "the optimizer is differentiable"
    parameters = [p for group in groups for p in group["params"]]
    return "the optimizer has a parameter twice" if len(set(parameters)) < len(parameters) else ""


def late_reason(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer would not step within the backward pass of a run, or ""."""
    if refusal := refusal_of(optimizer):
        return refusal
    # Hooks after the step may log gradients, which are None then.
    after = (*_global_optimizer_post_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    is_hidden = _hides_gradients(optimizer) and not after
    return "" if is_hidden else "hooks of the optimizer's step or of parameters have access to gradients"


def _hides_gradients(optimizer: Optimizer, most_hooks: int = 0) -> bool:
    """Return True if no hook before the step, and no hook of a parameter beyond `most_hooks`, may read a gradient."""
    before = (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values())
    if any(hook not in _NEEDLESS for hook in before):
        return False
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return not any(p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > most_hooks for p in parameters)


def require_steps_by_parameter(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if an optimizer cannot step within the backward pass.

    Raises:
        ModelError: several ranks share the model, and reduce gradients at the end of the backward pass.
        OptimizerError: an update may depend on the gradients of several parameters.
    """
    is_wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if is_wrapped or any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise ModelError(
            "plan.step_in_backward",
            problem="The plan updates each parameter within the backward pass, before the ranks that share the model "
            "exchange its gradient.",
            hint="Use a plan with step_in_backward=False.",
            code="step_in_backward.ranks",
        )
    if refusal := refusal_of(optimizer):
        raise OptimizerError(
            "plan.step_in_backward",
            problem=f"The plan steps the optimizer within the backward pass, but {refusal}.",
            hint="Use an optimizer of torch.optim such as AdamW, or a plan with step_in_backward=False.",
            code="step_in_backward.optimizer",
        )


def stepping_in(num_micro_batches: int, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """Return the context of a backward pass directly before the optimizer step in `run.train_step`.

    With an active `StepInBackward`, a single micro-batch, and no hooks or replaced step of the optimizer with access to
    gradients, parameters are updated inside the context. Otherwise the context does nothing.
    """
    found = _active.get(optimizer)
    hooks = None if found is None else found()
    return hooks.active() if hooks is not None and hooks.may_step(num_micro_batches) else contextlib.nullcontext()


def has_updated(optimizer: Optimizer) -> bool:
    """Return True if the open window has updated parameters within its backward pass, and so cannot be repeated."""
    found = _active.get(optimizer)
    hooks = None if found is None else found()
    return hooks is not None and bool(hooks.updated)


@contextlib.contextmanager
def gradients_seen(optimizer: Optimizer, see: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `see` with every parameter directly before its update within the backward pass, for proofs and tests."""
    found = _active.get(optimizer)
    hooks = None if found is None else found()
    if hooks is None:
        yield
        return
    hooks.see = see
    try:
        yield
    finally:
        hooks.see = None


def _update(hooks: weakref.ref[StepInBackward], parameter: Tensor) -> None:
    if (found := hooks()) is not None:
        found.update(parameter)


class StepInBackward:
    """Hooks on the parameters of an optimizer for updates in the backward passes inside `active`.

    Attributes:
        see: called with a parameter directly before its update; None: not called.
        updated: parameters updated within the backward pass since the last step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.see: Callable[[Tensor], object] | None = None
        # Without the hooks of the optimizer's step, which run once in the step at the end of the window.
        step: Any = type(optimizer).step
        self._step: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._is_active = False
        self.updated: set[Tensor] = set()
        self._num_steps = self._num_late = 0
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # Python's garbage collector does not see references from a parameter to its hooks.
        update = functools.partial(_update, weakref.ref(self))
        self._hooks = [p.register_post_accumulate_grad_hook(update) for p in parameters if p.requires_grad]
        self._hooks.append(optimizer.register_step_post_hook(self._count))
        _active[optimizer] = weakref.ref(self)

    def may_step(self, num_micro_batches: int) -> bool:
        """Return True if a window's single backward pass may update parameters: no user code has access to gradients.

        The loop over the parameters is short compared with an optimizer call per parameter.
        """
        is_own = not has_own_step(self._optimizer)
        return num_micro_batches == 1 and is_own and _hides_gradients(self._optimizer, most_hooks=1)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Update parameters in the backward pass inside the context."""
        self._groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        self._is_active = True
        self.updated.clear()
        try:
            yield
        except BaseException as error:
            if self.updated:
                error.add_note(
                    "Some parameters were updated before this error, because plan.step_in_backward is on. Restore a "
                    "checkpoint, or use a plan with step_in_backward=False."
                )
            raise
        finally:
            self._is_active = False

    def update(self, parameter: Tensor) -> None:
        """Update a parameter in a backward pass inside `active`."""
        if not self._is_active or parameter not in self._groups:
            return
        if parameter in self.updated:
            raise ModelError(
                "plan.step_in_backward",
                problem=f"plan.step_in_backward updated a parameter of shape {tuple(parameter.shape)} before its "
                "gradient was complete, because the backward pass computed the gradient in several parts (reentrant "
                "activation checkpointing).",
                hint="Use torch.utils.checkpoint with use_reentrant=False, or a plan with step_in_backward=False.",
                code="step_in_backward.in_parts",
            )
        self.updated.add(parameter)
        if self.see is not None:
            self.see(parameter)
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**self._groups[parameter], "params": [parameter]}]
        try:
            align_gradients(optimizer)
            self._step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def _count(self, *_: Any) -> None:
        self._num_steps += 1
        self._num_late += not self.updated
        self.updated.clear()

    def undo(self) -> None:
        """Remove the hooks; warn about steps after the backward pass."""
        if self._num_late:
            warnings.warn(
                f"plan.step_in_backward had no effect in {self._num_late} of {self._num_steps} steps. Train windows of "
                "one micro-batch with run.train_step, and remove hooks that may read gradients.",
                UserWarning,
                stacklevel=2,
            )
        for hook in self._hooks:
            hook.remove()
        _active.pop(self._optimizer, None)
