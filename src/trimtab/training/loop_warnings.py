"""Warnings about the user's loop: leftover lines of a plain loop, and unequal batches with a mean loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from trimtab.core.errors import LossError, ModelError
from trimtab.core.objective import precision_name
from trimtab.losses import Count, divisor_of_mean, require_unscaled
from trimtab.plans.plan import Plan
from trimtab.state.object_snapshots import version_of
from trimtab.techniques.mixed_precision import dtype_of
from trimtab.training.hooks import Hook
from trimtab.training.split_conditions import normalises_by_batch
from trimtab.training.window import OpenWindow, Window

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
    in the loop or the loss function), and, under a loss scale or for a `Summed` loss, that changed before the step
    without `run.unscale()` (clipping by hand).

    Args:
        optimizer: holds the parameters.
        ends: called when the check is over: the first window has ended, was dropped, or its gradients are unscaled.
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
                "Remove zero_grad() and loss.backward() from the loop, and clip gradients after its last micro-batch",
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
                "Gradients were changed before run.step(), while they still had a factor: the loss scale of fp16, or "
                "the number of terms of trimtab.Summed.",
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


class EvaluationMode(Hook):
    """Warns once if a model with dropout or batch normalisation stays in evaluation mode after an evaluation.

    A model that was in evaluation mode from the first step is trained in this mode on purpose; planning warns of it.

    Args:
        ends: called after the warning.
    """

    def __init__(self, model: nn.Module, ends: Callable[[Hook], None]) -> None:
        self._model, self._ends, self._was_training = model, ends, False

    def window_begins(self, window: Window) -> None:
        """Check the mode of the model."""
        if self._model.training:
            self._was_training = True
        if self._model.training or not self._was_training:
            return
        self._ends(self)
        if any(map(_depends_on_mode, self._model.modules())):
            text = "The model stayed in evaluation mode, and trains without dropout and with frozen batch statistics."
            hint = "Call model.train() after every evaluation."
            warnings.warn(f"{text} {hint}", RuntimeWarning, stacklevel=4)


def _depends_on_mode(module: nn.Module) -> bool:
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return is_dropout or normalises_by_batch(module)


def check_first_loss(loss: Tensor, plan: Plan, state: OpenWindow, *, is_scaled: bool) -> None:
    """Check the first loss of a run for leftover lines of a plain loop.

    Args:
        state: the window and its last forward.
        is_scaled: True if the run multiplies the loss by a loss scale.

    Raises:
        LossError: the loss was multiplied by the scale of a `GradScaler`.
    """
    require_unscaled(loss)
    if is_scaled and plan.proof is None:
        warn_of_own_functions(loss)
    forward, state.forward.watched_device = state.forward, ""
    _warn_of_other_autocast(forward.cast, str(plan.precision.value))
    if state.window is not None:
        _warn_of_divided_loss(loss, plan, state.window)


def _warn_of_other_autocast(found: torch.dtype | None, precision: str) -> None:
    """Warn if the model's forward ran under another autocast than the plan's."""
    if found is None or found is dtype_of(precision):
        return  # A forward without autocast is allowed, because the model may have its own inside.
    text = f"The forward of the model ran under torch.autocast to {str(found).removeprefix('torch.')}, which overrides "
    text += f"the plan's precision {precision}. Remove torch.autocast, and plan with "
    text += f'reference=trimtab.Reference("{precision_name(found)}"), or pass this precision to Plan.fixed.'
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _warn_of_divided_loss(loss: Tensor, plan: Plan, window: Window) -> None:
    """Warn if a mean was divided by the number of micro-batches or loader batches of the step."""
    numbers = {window.num_micro_batches, window.num_batches, plan.reference.accumulate} - {1}
    if numbers and (divisor := divisor_of_mean(loss)) in numbers:
        text = f"The mean loss is divided by {divisor:g}, the number of micro-batches or loader batches of a step, "
        text += "although the run averages over them. Remove the division. If it has another purpose, multiply the "
        text += f"loss by 1 / {divisor:g} instead."
        warnings.warn(text, RuntimeWarning, stacklevel=4)


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
