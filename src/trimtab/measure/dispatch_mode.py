"""Dispatch modes that do not disturb compiled code.

torch does not run compiled code under a dispatch mode. Worse, calling a compiled function under a mode permanently
disables its compilation, silently and for all models of the same class. Therefore compiled code runs in eager mode
meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_lock = threading.Lock()
_depth = 0  # number of active users in all threads; torch's stance is process-wide and restored by the last one
_stance: Any = None


@contextlib.contextmanager
def run_compiled_eagerly() -> Iterator[None]:
    """Run compiled code in eager mode inside the context, in the whole process.

    A model that is first called inside the context is compiled at a later call.
    """
    stand_back()
    try:
        yield
    finally:
        come_back()


def stand_back() -> None:
    """Switch to eager mode until the matching `come_back`. Calls nest."""
    global _depth, _stance
    with _lock:
        # Without this module nothing is compiled, and importing it is slow.
        if _stance is None and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")
        _depth += 1


def come_back() -> None:
    """End the effect of a `stand_back`."""
    global _depth, _stance
    with _lock:
        _depth -= 1
        if _depth == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None


class EagerDispatchMode(TorchDispatchMode):
    """Dispatch mode that switches compiled code to eager mode while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        stand_back()
        return entered

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            come_back()
