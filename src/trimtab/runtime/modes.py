"""Process-wide modes that runs share: the first run that needs one sets it, the last to close puts it back."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.core.errors import ValueGivenError
from trimtab.measure import allocator

Undo = Callable[[], None]


class SharedMode:
    """A mode that runs may hold at the same time (two models of one program), closed in any order.

    Args:
        apply: sets the mode, also where it is set already; returns what puts back what it found.
    """

    def __init__(self, apply: Callable[[], Undo]) -> None:
        self._apply = apply
        self._holders = 0

    def hold(self) -> Undo:
        """Set the mode, held already or not: what holds it may be suspended; returns what lets go of it."""
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
            given="retain where the C library's allocator cannot be set, or is set already",
            expected="glibc, and no MALLOC_ variable",
            way_out="Use keep.",
        )
    before = allocator.mode()
    allocator.set_mode("retain")
    return lambda: allocator.set_mode(before)


retained_memory = SharedMode(_retain_memory)
