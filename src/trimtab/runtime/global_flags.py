"""Process-wide flags shared by runs: set by the first run that needs a flag, restored by the last run to close."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.core.errors import ValueGivenError
from trimtab.measure import allocator

Undo = Callable[[], None]


class SharedMode:
    """Reference-counted flag for several concurrent runs, released in any order.

    Args:
        apply: sets the flag, even if already set; returns a function that restores the previous value.
    """

    def __init__(self, apply: Callable[[], Undo]) -> None:
        self._apply = apply
        self._holders = 0

    def hold(self) -> Undo:
        """Set the flag and count a holder; return a function that releases the flag.

        The flag is set even with other holders, since a suspension may have cleared the flag.
        """
        undo = self._apply()
        if self._holders == 0:
            self._undo = undo
        self._holders += 1
        return self._let_go

    def _let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._undo()


def _retain_memory() -> Undo:
    if not allocator.can_retain():
        raise ValueGivenError(
            "plan.allocator",
            problem='allocator="retain" needs glibc\'s malloc with default settings, but this process has another C '
            "library or a MALLOC_ environment variable.",
            hint='Use a plan with allocator="keep", or unset the MALLOC_ variables.',
            code="allocator.not_settable",
        )
    before = allocator.mode()
    allocator.set_mode("retain")
    return lambda: allocator.set_mode(before)


retained_memory = SharedMode(_retain_memory)
