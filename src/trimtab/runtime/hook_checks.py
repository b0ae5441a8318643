"""Checks of a run's gradient hooks: at the start, before the first step, and in the first forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.core.errors import ModelError
from trimtab.core.plan import Plan
from trimtab.runtime.compiled_call import is_compiled
from trimtab.runtime.user_hooks import (
    GradientHook,
    describe_hook,
    gradient_hooks,
    in_words,
    is_users,
    require_compatible,
)
from trimtab.runtime.window import Window

_ON_TENSORS = {
    Tensor.register_hook: "tensor hook",
    Tensor.register_post_accumulate_grad_hook: "post-accumulate-grad hook",
}


class ForwardHookCollector(TorchFunctionMode):
    """Collects hooks registered on tensors while the mode is active.

    Attributes:
        found: hooks registered by the user.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[GradientHook] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the hook if `func` registers a hook, then call `func`."""
        if (kind := _ON_TENSORS.get(func)) is not None:
            hook = args[1] if len(args) > 1 else (kwargs or {}).get("hook")
            if is_users(hook):
                self.found.append(describe_hook(hook, kind, "a tensor created in the forward"))
        return func(*args, **(kwargs or {}))


class HookChecks:
    """Gradient hooks of a run, checked at the start, before the first step and in the first forward.

    Attributes:
        found: all hooks.

    Raises:
        ModelError: a hook is incompatible with the plan (`require_compatible`).
        OptimizerError: a hook is incompatible with the plan (`require_compatible`).
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        clip_norm: float | None = None,
        nonfinite: str | None = None,
        out_of_memory: str | None = None,
    ) -> None:
        self._model, self._has_begun, self._is_watched = model, False, is_compiled(model) or bool(plan.compiled.value)
        self._of_forward: tuple[GradientHook, ...] = ()
        self._options = {"clip_norm": clip_norm, "nonfinite": nonfinite, "out_of_memory": out_of_memory}
        self.found = self._inspected(plan)

    @contextlib.contextmanager
    def first_forward(self, plan: Plan) -> Iterator[None]:
        """Check hooks registered by the first forward; later forwards are not watched.

        Compiled models are never watched, because an active mode would cause a recompilation.
        """
        if self._is_watched:
            yield
            return
        self._is_watched = True
        with ForwardHookCollector() as watch:
            yield
        if watch.found:
            self._of_forward = tuple(watch.found)
            self.found = self._inspected(plan)

    def _inspected(self, plan: Plan) -> tuple[GradientHook, ...]:
        found = gradient_hooks(self._model) + self._of_forward
        require_compatible(found, plan, **self._options)  # type: ignore[arg-type]
        return found

    def begin(self, plan: Plan) -> bool:
        """Check the model's hooks again before the first step; return True if the run has hooks."""
        if not self._has_begun:
            self.found, self._has_begun = self._inspected(plan), True
        return bool(self.found)

    def require_mean(self, window: Window | None, count: object) -> None:
        """Raise `ModelError` for a `Summed` loss over several micro-batches if the model has hooks."""
        if self.found and count is not None and window is not None and window.num_micro_batches > 1:
            raise ModelError(
                "run.backward",
                problem=f"The model has gradient hooks ({in_words(self.found)}), which would receive gradients that "
                "are not divided by the number of terms of trimtab.Summed, because a step has several micro-batches.",
                hint="Return a mean loss, train one batch per step in one micro-batch, or remove the hooks.",
                code="hooks.gradient_scaled",
            )
