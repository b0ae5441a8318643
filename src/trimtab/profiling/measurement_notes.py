"""Fault tolerance of measurements: a failed one is left out, and a note records the reason.

Model, loss and data are the user's, and torch's instruments (dispatch modes, fake tensors, hooks) do not support
every program. Only the plain training step decides if a loop works: if the step fails, planning raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from trimtab.core.choice import Note
from trimtab.core.errors import LossError, TrimtabError
from trimtab.plans.profile import OUT_OF_MEMORY
from trimtab.training.loop_warnings import graph_used
from trimtab.training.out_of_memory import is_out_of_memory

T = TypeVar("T")


def describe(error: BaseException) -> str:
    """Return an exception's class and the first line of its message, up to 200 characters."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class Notes:
    """Notes of a planning session, without duplicates."""

    def __init__(self) -> None:
        self._found: dict[Note, None] = {}

    @property
    def found(self) -> tuple[Note, ...]:
        """Notes so far."""
        return tuple(self._found)

    def add(self, code: str, what: str, why: BaseException | str) -> None:
        """Record a missing measurement: a clause such as "FLOP were not counted", and the exception or a reason."""
        reason = why.reason if isinstance(why, TrimtabError) else why if isinstance(why, str) else describe(why)
        self.record(code, f"{what}: {reason}")

    def record(self, code: str, text: str) -> None:
        """Record a note with a complete text."""
        self._found[Note(code, text)] = None

    def attempt(self, code: str, what: str, function: Callable[[], T], default: T) -> T:
        """Return the function's result, or the default and a note if it raises."""
        try:
            return function()
        except Exception as error:  # Any exception of the user's code or of torch; its reason is recorded.
            self.add(code, what, error)
            return default


def report_not_restorable(changes: Sequence[object], notes: Notes) -> None:
    """Warn once, with a note in the plan, of iterators and queues that planning consumed and cannot restore."""
    if not changes:
        return
    names = ", ".join(map(str, changes))
    text = f"Planning consumed items of {names}, and could not restore them because they cannot be copied"
    remedy = "Pass the values in the batch, or create the iterator again after planning"
    notes.record("state.not_restored", f"{text}. {remedy}")
    warnings.warn(f"{text}. {remedy}.", RuntimeWarning, stacklevel=2)


def loss_failed(error: Exception) -> LossError:
    """Return the error of a loop whose plain forward or backward raises."""
    if (found := graph_used(error)) is not None:
        return found
    return LossError(
        "loss_fn",
        got=describe(error),
        expected="a forward and backward without errors",
        problem=f"The forward and backward of the example batch failed, with all settings unchanged "
        f"({describe(error)}).",
        hint="Run loss_fn(model, batch).backward() yourself, and correct the model, the loss function or the batch.",
        code="loss.failed",
    )


class CallbackError(BaseException):
    """Carries an exception of the user's progress callback past the handlers of measuring stages."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def progress_with_callback_errors(progress: Callable[[str], None]) -> Callable[[str], None]:
    """Return the progress callback with exceptions converted to `CallbackError`, which ends planning."""

    def report(text: str) -> None:
        try:
            progress(text)
        except Exception as error:
            raise CallbackError(error) from error

    return report
