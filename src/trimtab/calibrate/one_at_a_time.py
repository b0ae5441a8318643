"""One planning at a time in a process: it changes process-wide state, and times and counts what runs in the process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Reentrant: a plan is made by functions that each take it.
_planning = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Make calls from several threads wait for each other.

    Random generators, fp32 modes, the allocator's mode, `torch.compile`'s stance and garbage collection belong to the
    process. Two measurements at once would restore each other's state, and each would time the other's work.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _planning:
            return function(*args, **kwargs)

    return alone
