"""Warnings about the user's loop: leftover lines of a plain loop, and unequal batches with a mean loss."""

from __future__ import annotations

import contextlib
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from trimtab.core.errors import LossError, ModelError
from trimtab.core.plan import Plan
from trimtab.state.object_snapshots import version_of
from trimtab.training.call_order import CallOrder
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
_TORCH, _OWN = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


class LeftoverStep:
    """Warns once if the loop steps the optimizer itself, which would step parameters twice per window.

    Args:
        order: state of the loop; shows if the run itself is stepping the optimizer.
    """

    def __init__(self, order: CallOrder) -> None:
        self._order, self._has_warned = order, False

    def watch(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Watch an optimizer's steps; return a function that ends this."""
        return optimizer.register_step_post_hook(self._stepped).remove

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._order.in_optimizer or self._has_warned:
            return
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return  # A step without gradients changes nothing.
        frame = _caller()
        if frame is None or frame.f_code.co_filename.startswith(_OWN):
            return  # Planning times optimizer steps.
        self._has_warned = True
        name, number = frame.f_code.co_filename, frame.f_lineno
        where, line = f"{name}:{number}", linecache.getline(name, number).strip()
        is_open = self._order.window is not None
        if is_open:
            text = (
                f"optimizer.step() at {where} bypasses the run, which then does not clip, unscale or count the step. "
            )
            text += "Call run.step() instead."
        else:
            text = f"optimizer.step() at {where} steps in addition to run.step(), so that each step is applied twice. "
            text += "Remove the call of optimizer.step()."
        warnings.warn(
            f"{text} The line is: {line}" if line else text,
            RuntimeWarning,
            stacklevel=3,
        )


class LeftoverGradientChanges:
    """Warns once if leftover lines of a plain loop change gradients.

    In the first window, gradients are compared with their recorded state before each backward and before the step. The
    warning covers gradients that were removed (`zero_grad`), that changed without `run.backward` (a `loss.backward()`
    in the loop or the loss function), and, under a loss scale, that changed before the step without `run.unscale()`
    (clipping by hand).

    Args:
        optimizer: holds the parameters.
        is_on: False disables the check.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_on: bool) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]] if is_on else []
        self._seen: list[tuple[Tensor, int | None] | None] | None = None
        self._is_on, self._num_backwards = is_on, 0

    def begin(self) -> None:
        """Record gradients as a window opens, after they were dropped."""
        if self._is_on:
            self._note()

    def backward_begins(self) -> None:
        """Check gradients before a micro-batch's backward."""
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

    def backward_done(self) -> None:
        """Record gradients after a micro-batch's backward."""
        if self._is_on:
            self._num_backwards += 1
            self._note()

    def step_begins(self, *, is_scaled: bool) -> None:
        """Check gradients before the optimizer's step, and end the check.

        Args:
            is_scaled: True if gradients still have a loss scale that the step will remove.
        """
        if not self._is_on:
            return
        seen = self._seen or []
        if any(was is not None and p.grad is None for was, p in zip(seen, self._parameters, strict=False)):
            self._warn(
                "Gradients were removed between run.backward(loss) and run.step(), so that the step changes nothing.",
                "Remove zero_grad() from the loop, because the run removes gradients after each step",
            )
        elif is_scaled and self._has_changed():
            self._warn(
                "Gradients were changed before run.step(), while they were multiplied by the loss scale of fp16.",
                "Call run.unscale() before the change, or pass clip_norm= to trimtab.start instead of clipping by hand",
            )
        self.end()

    def end(self) -> None:
        """End the check: the first window is over or dropped, or its gradients are unscaled."""
        self._is_on, self._seen, self._parameters = False, None, []

    def _note(self) -> None:
        self._seen = [None if p.grad is None else (p.grad, version_of(p.grad)) for p in self._parameters]

    def _has_changed(self) -> bool:
        def differs(was: tuple[Tensor, int | None] | None, now: Tensor | None) -> bool:
            if was is None or now is None:
                return (was is None) != (now is None)
            return was[0] is not now or was[1] != version_of(now)

        return any(differs(was, p.grad) for was, p in zip(self._seen or [], self._parameters, strict=False))

    def _warn(self, text: str, remedy: str) -> None:
        self.end()
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


@contextlib.contextmanager
def explain_backward_errors() -> Iterator[None]:
    """Convert known errors of a backward pass into errors with an explanation.

    Raises:
        LossError: an earlier backward freed the loss's graph.
        ModelError: a recomputation differed from its forward.
    """
    try:
        yield
    except CheckpointError as error:
        raise ModelError(
            "plan.recompute",
            problem=f"The recomputed forward of a block differs from the first: "
            f"{str(error).splitlines()[0].rstrip('.')}.",
            hint="Make the block compute the same operators on the same shapes, or use a plan with recompute=None.",
            code="recompute.differs",
        ) from error
    except RuntimeError as error:
        if (found := graph_used(error)) is None:
            raise
        raise found from error


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


def _caller() -> FrameType | None:
    """Return the innermost frame outside of torch and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    return frame


class UnequalBatches:
    """Warns once if a window joins unequal batches although the loss is not a mean over samples.

    Batches are weighted by their samples, which is wrong for such a loss.
    """

    def __init__(self, plan: Plan) -> None:
        check = plan.check
        is_found = check is not None and not check.splittable and check.relative_difference is not None
        self._is_on = is_found and check.relative_difference > check.tolerance  # type: ignore[operator,union-attr]

    def look(self, window: Window) -> None:
        """Check a window whose loss is a mean."""
        if not self._is_on or window.has_equal_batches:
            return
        self._is_on = False
        warnings.warn(
            "A step has loader batches of unequal sizes and weights their losses by samples, but the plan's check "
            "found that the loss is not a mean over samples. Return trimtab.Summed(loss_sum, count), or use loader "
            "batches of equal size (drop_last=True).",
            RuntimeWarning,
            stacklevel=4,
        )
