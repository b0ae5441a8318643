"""When a window's micro-batches begin and when its step is done, on the device's own clock, without waiting for it."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WindowSeconds:
    """Seconds of each micro-batch but the last, and of the whole window, the optimizer's step in it."""

    micro_s: tuple[float, ...]
    window_s: float


class WindowClock:
    """Stamps of one window; on CUDA events in the stream, read when they have passed."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stamps: list[float | torch.cuda.Event] = []

    def begin(self) -> None:
        """A micro-batch begins."""
        self._stamps.append(self._now())

    def drop(self) -> None:
        """The window was given up."""
        self._stamps.clear()

    def end(self) -> Stamped:
        """The step is done; returns what can be read later."""
        stamps, self._stamps = [*self._stamps, self._now()], []
        return Stamped(stamps)

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stamped:
    """The stamps of a whole window."""

    def __init__(self, stamps: list[float | torch.cuda.Event]) -> None:
        self._stamps = stamps

    def read(self) -> WindowSeconds:
        """Return the seconds; waits for the window's own end alone."""
        last = self._stamps[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        each = [_between(before, after) for before, after in itertools.pairwise(self._stamps)]
        return WindowSeconds(tuple(each[:-1]), sum(each))


def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, torch.cuda.Event):
        milliseconds: float = before.elapsed_time(after)
        return milliseconds / 1e3
    assert isinstance(after, float)
    return after - before
