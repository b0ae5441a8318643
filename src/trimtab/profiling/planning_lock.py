"""Lock against concurrent planning in a process: planning changes process-wide state and measures the process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Reentrant, because planning functions that hold it call each other.
_planning = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a planning function so that concurrent calls run sequentially.

    Random generators, fp32 modes, the allocator's mode, `torch.compile`'s stance and garbage collection are
    process-wide. Concurrent measurements would restore and time each other.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _planning:
            return function(*args, **kwargs)

    return alone
