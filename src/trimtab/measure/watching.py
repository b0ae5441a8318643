"""Looking at every operator of a call, without a trace in what is compiled.

What torch compiles it does not run compiled under a dispatch mode; and the frame of a compiled function that was called
under one it gives up for good, for every model of its class: from then on all of them run as they were, without a word.
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
_depth = 0  # of those inside, of any thread: torch's stance is the process's, and put back when the last one leaves
_stance: Any = None


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Have what is compiled run as it was inside, in all of the process, and compiled again after it.

    A model that is called for the first time since it was told to be compiled is compiled later.
    """
    stand_back()
    try:
        yield
    finally:
        come_back()


def stand_back() -> None:
    """Have what is compiled run as it was, until as many have come back as stood back."""
    global _depth, _stance
    with _lock:
        if _stance is None and "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes long
            _stance = torch.compiler.set_stance("force_eager")
        _depth += 1


def come_back() -> None:
    """End one `stand_back`."""
    global _depth, _stance
    with _lock:
        _depth -= 1
        if _depth == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None


class Watching(TorchDispatchMode):
    """torch's dispatch mode, under which nothing that is compiled is given up."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        stand_back()
        return entered

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            come_back()
