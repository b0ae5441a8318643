"""One-line descriptions of exceptions from the user's model or the device."""

from __future__ import annotations

from trimtab.core.plan_note import Note
from trimtab.core.profile import OUT_OF_MEMORY, RAN_OUT
from trimtab.runtime.out_of_memory import is_out_of_memory


def describe(error: BaseException) -> str:
    """Return an exception's class and the first line of its message, up to 200 characters."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def failure_of(error: BaseException) -> Note:
    """Return the failure of a trial that raised an exception."""
    return Note(RAN_OUT if is_out_of_memory(error) else "trial.failed", describe(error))
