"""Interruptible wait until a wall-clock time."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from trimtab.checkpoint.signals import Signals

# Upper bound on the reaction time to a signal, to a changed clock, or after a suspend.
SLICE_S = 1.0


@dataclass(frozen=True)
class Clock:
    """Wall clock, replaceable in tests.

    Args:
        now: returns seconds since 1970.
        sleep: sleeps for a number of seconds.
    """

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@contextlib.contextmanager
def catch_signals() -> Iterator[Signals]:
    """Catch termination signals inside the block, where no run may handle them; act on a signal at its end.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit code is 128 plus its number.
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
    """Wait until a time and return the seconds waited; unreferenced memory, including a GPU's, is freed first.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit code is 128 plus its number.
    """
    begun_s = clock.now()
    if begun_s >= moment_s:
        return 0.0
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with catch_signals() as signals:
        while (left_s := moment_s - clock.now()) > 0 and signals.came is None:
            clock.sleep(min(left_s, SLICE_S))
    return clock.now() - begun_s
