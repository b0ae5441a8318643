"""Warnings about the user's loop: leftover lines of a plain loop, and unequal batches with a mean loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from trimtab.core.errors import LossError, ModelError
from trimtab.losses import Count
from trimtab.plans.plan import Plan
from trimtab.state.object_snapshots import version_of
from trimtab.training.hooks import Hook
from trimtab.training.window import Window

_MOST_NODES = 20_000  # Largest number of nodes of the autograd graph to visit.
_LINEAR = (
    "torch",
    "torchvision",
    "flash_attn",
    "xformers",
    "triton",
    "deepspeed",
    "trimtab",
)  # Packages whose autograd functions are assumed to be linear in the gradient.


class LeftoverGradientChanges(Hook):
    """Warns once if leftover lines of a plain loop change gradients.

    In the first window, gradients are compared with their recorded state before each backward and before the step. The
    warning covers gradients that were removed (`zero_grad`), that changed without `run.backward` (a `loss.backward()`
    in the loop or the loss function), and, under a loss scale, that changed before the step without `run.unscale()`
    (clipping by hand). `ends` is called with this hook when the check is over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ends: Callable[[Hook], None]) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._seen: list[tuple[Tensor, int | None] | None] = []
        self._ends, self._num_backwards = ends, 0

    def window_begins(self, window: Window) -> None:
        self._note()

    def backward_begins(self) -> None:
        if not self._has_changed():
            return
        if self._num_backwards == 0:
            self._warn(
                "Parameters had gradients before the step's first run.backward(loss), which adds to these gradients.",
                "Remove loss.backward() from the loop and from the loss function",
            )
        else:
            self._warn(
                "Gradients changed between two calls of run.backward in one step, which accumulate gradients.",
                "Remove zero_grad() and loss.backward() from the loop",
            )

    def backward_ends(self, rows: int, terms: Count) -> None:
        self._num_backwards += 1
        self._note()

    def step_begins(self, *, is_scaled: bool) -> None:
        if any(was is not None and p.grad is None for was, p in zip(self._seen, self._parameters, strict=False)):
            self._warn(
                "Gradients were removed between run.backward(loss) and run.step(), so that the step changes nothing.",
                "Remove zero_grad() from the loop, because the run removes gradients after each step",
            )
        elif is_scaled and self._has_changed():
            self._warn(
                "Gradients were changed before run.step(), while they were multiplied by the loss scale of fp16.",
                "Call run.unscale() before the change, or pass clip_norm= to trimtab.start instead of clipping by hand",
            )
        self._end()

    def gradient_complete(self, scale: float | Tensor) -> None:
        self._end()

    def window_dropped(self) -> None:
        self._end()

    def _end(self) -> None:
        self._seen, self._parameters = [], []
        self._ends(self)

    def _note(self) -> None:
        self._seen = [None if p.grad is None else (p.grad, version_of(p.grad)) for p in self._parameters]

    def _has_changed(self) -> bool:
        def differs(was: tuple[Tensor, int | None] | None, now: Tensor | None) -> bool:
            if was is None or now is None:
                return (was is None) != (now is None)
            return was[0] is not now or was[1] != version_of(now)

        return any(differs(was, p.grad) for was, p in zip(self._seen, self._parameters, strict=False))

    def _warn(self, text: str, remedy: str) -> None:
        self._end()
        warnings.warn(f"{text} {remedy}.", RuntimeWarning, stacklevel=4)


def warn_of_own_functions(loss: Tensor) -> None:
    """Warn if a loss's graph has user-defined autograd functions, whose backward receives scaled gradients."""
    pending, seen = [loss.grad_fn], set[Any]()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [each for each, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__.partition(".")[0] not in _LINEAR:
            warnings.warn(
                f"The backward of {function.__qualname__} receives gradients multiplied by the loss scale of fp16. If "
                "the backward clamps or normalises gradients, training differs from fp32. Use trimtab.plan(...), which "
                "compares the gradients, or a plan with bf16 or fp32.",
                RuntimeWarning,
                stacklevel=4,
            )
            return


def explained(error: RuntimeError) -> LossError | ModelError | None:
    """Return an error that explains a failed backward pass; None for unknown errors.

    A `LossError` means a graph freed by an earlier backward, a `ModelError` a recomputation with another result.
    """
    if isinstance(error, CheckpointError):
        return ModelError(
            "plan.recompute",
            problem=f"The recomputed forward of a block differs from the first: "
            f"{str(error).splitlines()[0].rstrip('.')}.",
            hint="Make the block compute the same operators on the same shapes, or use a plan with recompute=None.",
            code="recompute.differs",
        )
    return graph_used(error)


def graph_used(error: BaseException) -> LossError | None:
    """Return the error for a loss whose graph was freed by an earlier backward; None for other errors."""
    if "backward through the graph a second time" not in str(error):
        return None
    return LossError(
        "loss_fn",
        problem="The autograd graph of the loss was freed by an earlier backward.",
        hint="Remove loss.backward() from the loss function and the loop, and detach() tensors kept from earlier "
        "steps.",
        code="loss.graph_used",
    )


class UnequalBatches:
    """Warns once if a window joins unequal batches although the loss is not a mean over samples.

    Batches are weighted by samples, a wrong weight for a sum or a mean over tokens. `is_on` is True if the plan's check
    found such a loss, until the warning.
    """

    def __init__(self, plan: Plan) -> None:
        check = plan.check
        is_found = check is not None and not check.splittable and check.relative_difference is not None
        self.is_on = is_found and check.relative_difference > check.tolerance  # type: ignore[operator,union-attr]

    def look(self, window: Window) -> None:
        """Check a window whose loss is a mean, before its last backward."""
        if window.has_equal_batches:
            return
        self.is_on = False
        warnings.warn(
            "A step has loader batches of unequal sizes and weights their losses by samples, but the plan's check "
            "found that the loss is not a mean over samples. Return trimtab.Summed(loss_sum, count), or use loader "
            "batches of equal size (drop_last=True).",
            RuntimeWarning,
            stacklevel=3,
        )
