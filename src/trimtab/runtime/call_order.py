"""State machine of the loop's method calls; a call out of order raises before changing any state.

idle -> window open -> (micro-batch begun -> forward seen -> backward done)* -> complete -> [unscaled] -> idle
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from trimtab.core.errors import LoopError
from trimtab.runtime.compiled_call import noting_calls
from trimtab.runtime.window import Window

_WAY_OUT = "Call run.backward(loss) once for every micro-batch, inside the loop over the window."
_STEPPED = (
    "run.train_step steps by itself: to step in the loop, call run.accumulate(window, loss_fn) in its place. "
    "A window that is opened up needs run.backward(loss) once for every micro-batch."
)
_GIVE_UP = "Finish it, or give it up with run.discard()."


class CallOrder:
    """State of a run within its window."""

    def __init__(self) -> None:
        self.forward = ForwardRecorder()
        self.reset()

    def reset(self) -> None:
        """Return to idle."""
        self.window: Window | None = None
        self.micro_rows = 0
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
                got="the next micro-batch of a window that was given up",
                expected="one of the open window",
                hint="Leave the loop over it (break), and take the next window.",
            )
        self.micro_rows, self._last = rows, last
        self._awaiting_backward, self.forward.seen = True, False

    def end_micro_batch(self, window: Window) -> None:
        """Check that backward was called, after the loop's body for a micro-batch."""
        if self.window is window and self._awaiting_backward:
            raise LoopError(
                "window",
                got="the next micro-batch before run.backward",
                expected="run.backward(loss) for each",
                hint=_WAY_OUT + " A window cannot be turned into a list.",
            )

    def require_micro_batch(self) -> None:
        """Check that a micro-batch is open and has had a forward of the model."""
        if not self._awaiting_backward:
            raise LoopError(
                "run.backward", got="no open micro-batch", expected="one call per micro-batch", hint=_WAY_OUT
            )
        if not self.forward.seen:
            raise LoopError(
                "run.backward",
                got="a loss without a forward of run.model for this micro-batch",
                expected="loss_fn(run.model, micro)",
                hint="Call run.model(...) itself, not a copy, a submodule or another method of it.",
            )

    def backward_done(self) -> None:
        """Mark the micro-batch's backward as done."""
        self._awaiting_backward = self.forward.seen = False

    def require_idle(self, verb: str) -> None:
        """Raise `LoopError` if a window is open."""
        self._require_closed(verb, "a new window before run.step()", "run.step() for the window that is open")

    def require_stepped(self, verb: str) -> None:
        """Raise `LoopError` if a window is still open at the end of the loader."""
        given = "the loader's end with a window open"
        self._require_closed(verb, given, "run.step() after each window's last micro-batch")

    def _require_closed(self, verb: str, given: str, expected: str) -> None:
        if self.window is not None:
            raise LoopError(verb, got=given, expected=expected, hint=_GIVE_UP)

    def require_complete(self, verb: str) -> Window:
        """Return the open window, after checking that every micro-batch had its backward."""
        if self.window is None:
            raise LoopError(verb, got="no window", expected="a window's micro-batches first", hint=_STEPPED)
        if not self._last or self._awaiting_backward:
            raise LoopError(
                verb,
                got="a window whose last micro-batch was not seen",
                expected="run.backward for every micro-batch",
                hint="Do not leave the loop over a window early, or give the window up with run.discard().",
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
