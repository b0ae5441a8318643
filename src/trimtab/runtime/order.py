"""The order of the loop's verbs, as a state machine; every breach raises before anything is changed.

idle -> window open -> (micro-batch begun -> forward seen -> backward done)* -> complete -> [unscaled] -> idle
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from trimtab.core.errors import LoopError
from trimtab.runtime.compiled import noting_calls
from trimtab.runtime.window import Window

_WAY_OUT = "Call run.backward(loss) once for every micro-batch, inside the loop over the window."
_STEPPED = (
    "run.train_step steps by itself: to step in the loop, call run.accumulate(window, loss_fn) in its place. "
    "A window that is opened up needs run.backward(loss) once for every micro-batch."
)
_GIVE_UP = "Finish it, or give it up with run.discard()."


class LoopOrder:
    """Where a run stands inside its window."""

    def __init__(self) -> None:
        self.forward = ForwardSeen()
        self.reset()

    def reset(self) -> None:
        """Go back to idle."""
        self.window: Window | None = None
        self.micro_rows = 0
        self.unscaled = self.in_optimizer = False
        self._last = self._awaiting_backward = False

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch at hand is the window's last."""
        return self._last

    def open(self, window: Window) -> None:
        """A window's first micro-batch is asked for."""
        self.require_idle("window")
        self.window = window

    def begin_micro_batch(self, window: Window, rows: int, *, last: bool) -> None:
        """A micro-batch is handed out."""
        if self.window is not window:
            raise LoopError(
                "window",
                given="the next micro-batch of a window that was given up",
                expected="one of the open window",
                way_out="Leave the loop over it (break), and take the next window.",
            )
        self.micro_rows, self._last = rows, last
        self._awaiting_backward, self.forward.seen = True, False

    def end_micro_batch(self, window: Window) -> None:
        """The loop's body for a micro-batch has run."""
        if self.window is window and self._awaiting_backward:
            raise LoopError(
                "window",
                given="the next micro-batch before run.backward",
                expected="run.backward(loss) for each",
                way_out=_WAY_OUT + " A window cannot be turned into a list.",
            )

    def require_micro_batch(self) -> None:
        """Before backward: a micro-batch is open and the model ran forward on it."""
        if not self._awaiting_backward:
            raise LoopError(
                "run.backward", given="no open micro-batch", expected="one call per micro-batch", way_out=_WAY_OUT
            )
        if not self.forward.seen:
            raise LoopError(
                "run.backward",
                given="a loss without a forward of run.model for this micro-batch",
                expected="loss_fn(run.model, micro)",
                way_out="Call run.model(...) itself, not a copy, a submodule or another method of it.",
            )

    def backward_done(self) -> None:
        """After backward."""
        self._awaiting_backward = self.forward.seen = False

    def require_idle(self, verb: str) -> None:
        """No window is open."""
        self._require_closed(verb, "a new window before run.step()", "run.step() for the window that is open")

    def require_stepped(self, verb: str) -> None:
        """No window is left open where the loop ends."""
        given = "the loader's end with a window open"
        self._require_closed(verb, given, "run.step() after each window's last micro-batch")

    def _require_closed(self, verb: str, given: str, expected: str) -> None:
        if self.window is not None:
            raise LoopError(verb, given=given, expected=expected, way_out=_GIVE_UP)

    def require_complete(self, verb: str) -> Window:
        """Every micro-batch of the window had its backward; returns the window."""
        if self.window is None:
            raise LoopError(verb, given="no window", expected="a window's micro-batches first", way_out=_STEPPED)
        if not self._last or self._awaiting_backward:
            raise LoopError(
                verb,
                given="a window whose last micro-batch was not seen",
                expected="run.backward for every micro-batch",
                way_out="Do not leave the loop over a window early, or give the window up with run.discard().",
            )
        return self.window


class ForwardSeen:
    """Forward pre-hook that notes the watched model ran. A copy of the model (an EMA) shares it, and does not count."""

    def __init__(self) -> None:
        self.seen = False
        self._watched: Callable[[], nn.Module | None] = lambda: None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._watched():
            self.note()

    def note(self) -> None:
        """The model runs forward."""
        self.seen = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardSeen:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ForwardSeen, ()

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Install the hook, or what sees a model that is compiled in place; returns what removes it."""
        if model._compiled_call_impl is not None:
            return noting_calls(model, self.note)
        self._watched = weakref.ref(model)
        try:
            return model.register_forward_pre_hook(self).remove
        except Exception:  # a scripted model, or a class of the user's, takes none
            return noting_calls(model, self.note)
