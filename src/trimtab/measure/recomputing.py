"""Whoever asks is told when a forward is run again in a backward, and when it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[], contextlib.AbstractContextManager[object]]
_listeners: list[Listener] = []


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have every recomputation inside the block run within what a listener returns."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """What runs inside was run before."""
    with contextlib.ExitStack() as stack:
        for listener in tuple(_listeners):
            stack.enter_context(listener())
        yield
