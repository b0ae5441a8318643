"""Waiting for a moment: by the clock of the day, and left at once where a signal asks."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from trimtab.checkpoint.signals import Signals

# A signal is answered within it, and so is a clock that was set, or a machine that slept.
SLICE_S = 1.0


@dataclass(frozen=True)
class Clock:
    """What tells the time, and lets it pass.

    Args:
        now: seconds since 1970. sleep: for so many seconds.
    """

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@contextlib.contextmanager
def heeded() -> Iterator[Signals]:
    """Note SIGTERM and SIGINT inside the block, for which nobody else may be there; what came is answered at its end.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit is 128 and its number.
    """
    signals = Signals()
    signals.install()
    try:
        yield signals
    finally:
        signals.restore()
    if signals.came is not None:
        signals.leave()


def wait_until(moment_s: float, clock: Clock) -> float:
    """Wait for a moment; returns the seconds waited. What no longer has an owner is freed first, a GPU's memory too.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit is 128 and its number.
    """
    begun_s = clock.now()
    if begun_s >= moment_s:
        return 0.0
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with heeded() as signals:
        while (left_s := moment_s - clock.now()) > 0 and signals.came is None:
            clock.sleep(min(left_s, SLICE_S))
    return clock.now() - begun_s
