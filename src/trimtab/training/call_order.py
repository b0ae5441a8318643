"""State machine of the loop's method calls; a call out of order raises before changing any state.

idle -> window open -> (micro-batch begun -> forward seen -> backward done)* -> complete -> [unscaled] -> idle
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from trimtab.core.errors import LoopError
from trimtab.settings.compiled import noting_calls
from trimtab.training.window import Window

_BACKWARD = "Call run.backward(loss) once for every micro-batch, inside `for micro in window`."
_STEPPED = (
    "run.train_step() calls run.step() itself. To call run.step() in the loop, use run.accumulate(window, loss_fn), or "
    "`for micro in window` with run.backward(loss), before run.step()."
)
_FINISH = "Complete the open window with run.step(), or drop it with run.discard()."


class CallOrder:
    """State of a run within its window."""

    def __init__(self) -> None:
        self.forward = ForwardRecorder()
        self.reset()

    def reset(self) -> None:
        """Return to idle."""
        self.window: Window | None = None
        self.micro_batch_samples = 0
        self.unscaled = self.in_optimizer = False
        self._last = self._awaiting_backward = False

    @property
    def is_last(self) -> bool:
        """True if the current micro-batch is the window's last."""
        return self._last

    def open(self, window: Window) -> None:
        """Open a window, before its first micro-batch."""
        self.require_idle("window")
        self.window = window

    def begin_micro_batch(self, window: Window, rows: int, *, last: bool) -> None:
        """Begin a micro-batch."""
        if self.window is not window:
            raise LoopError(
                "window",
                problem="The loop continued over a window that run.discard() or an error had ended.",
                hint="Leave `for micro in window` with break, and continue with the next window.",
                code="loop.window_ended",
            )
        self.micro_batch_samples, self._last = rows, last
        self._awaiting_backward, self.forward.seen = True, False

    def end_micro_batch(self, window: Window) -> None:
        """Check that backward was called, after the loop's body for a micro-batch."""
        if self.window is window and self._awaiting_backward:
            raise LoopError(
                "window",
                problem="The next micro-batch was requested before run.backward(loss) was called for the current "
                "micro-batch.",
                hint=_BACKWARD + " Do not convert a window to a list.",
                code="loop.backward_missing",
            )

    def require_micro_batch(self) -> None:
        """Check that a micro-batch is open and has had a forward of the model."""
        if not self._awaiting_backward:
            raise LoopError(
                "run.backward",
                problem="run.backward was called without an open micro-batch, or twice for the same micro-batch.",
                hint=_BACKWARD,
                code="loop.no_micro_batch",
            )
        if not self.forward.seen:
            raise LoopError(
                "run.backward",
                problem="run.backward was called before run.model had a forward for this micro-batch.",
                hint="Compute the loss with run.model(...), not with a copy, a submodule or another method of the "
                "model.",
                code="loop.forward_missing",
            )

    def backward_done(self) -> None:
        """Mark the micro-batch's backward as done."""
        self._awaiting_backward = self.forward.seen = False

    def require_idle(self, verb: str) -> None:
        """Raise `LoopError` if a window is open."""
        self._require_closed(verb, "A new window was requested before run.step() for the open window.")

    def require_stepped(self, verb: str) -> None:
        """Raise `LoopError` if a window is still open at the end of the loader."""
        self._require_closed(verb, "The loader ended while a window was open, without run.step() for its gradients.")

    def _require_closed(self, verb: str, problem: str) -> None:
        if self.window is not None:
            raise LoopError(verb, problem=problem, hint=_FINISH, code="loop.window_open")

    def require_complete(self, verb: str) -> Window:
        """Return the open window, after checking that every micro-batch had its backward."""
        if self.window is None:
            problem = f"{verb}() was called without an open window."
            raise LoopError(verb, problem=problem, hint=_STEPPED, code="loop.no_window")
        if not self._last or self._awaiting_backward:
            raise LoopError(
                verb,
                problem=f"{verb}() was called before run.backward(loss) for the last micro-batch of the window.",
                hint="Complete the loop over the window, or drop the window with run.discard().",
                code="loop.window_incomplete",
            )
        return self.window


class ForwardRecorder:
    """Forward pre-hook that records calls of the watched model, but not of copies such as an EMA."""

    def __init__(self) -> None:
        self.seen = False
        self._watched: Callable[[], nn.Module | None] = lambda: None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._watched():
            self.note()

    def note(self) -> None:
        """Record a forward of the model."""
        self.seen = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardRecorder:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ForwardRecorder, ()

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Install the hook, or wrap the call of a compiled model; return a function that removes it."""
        if model._compiled_call_impl is not None:
            return noting_calls(model, self.note)
        self._watched = weakref.ref(model)
        try:
            return model.register_forward_pre_hook(self).remove
        except Exception:  # A scripted model or a user-defined class may reject hooks.
            return noting_calls(model, self.note)
