"""Looking at every operator of a call, without a trace in what is compiled.

What torch compiles it does not run compiled under a dispatch mode; and the frame of a compiled function that was called
under one it gives up for good, for every model of its class: from then on all of them run as they were, without a word.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Have what is compiled run as it was inside, and compiled again after it."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing the compiler takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class Watching(TorchDispatchMode):
    """torch's dispatch mode, under which nothing that is compiled is given up."""

    def __init__(self) -> None:
        super().__init__()
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(eagerly())
            super().__enter__()
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._entered.pop().close()
