"""Notification of listeners about recomputation in a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[], contextlib.AbstractContextManager[object]]
_listeners: list[Listener] = []


@contextlib.contextmanager
def listen_to_recomputation(listener: Listener) -> Iterator[None]:
    """Run every recomputation inside the block within the context manager returned by `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Mark the code inside the context as recomputation."""
    with contextlib.ExitStack() as stack:
        for listener in tuple(_listeners):
            stack.enter_context(listener())
        yield
