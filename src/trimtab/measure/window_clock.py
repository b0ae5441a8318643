"""When a window's micro-batches begin and when its step is done, on the device's own clock, without waiting for it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trimtab.measure.spent import stamp

_Stamp = float | torch.cuda.Event


@dataclass(frozen=True)
class WindowSeconds:
    """Seconds of each micro-batch but the last, and of the whole window, from its opening to its step."""

    micro_s: tuple[float, ...]
    window_s: float


class WindowClock:
    """Stamps of one window; on CUDA events in the stream, read when they have passed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[_Stamp] = []
        self._aside: list[_Stamp] = []

    def open(self) -> None:
        """The window begins."""
        self._stamps, self._aside = [self._now()], []

    def begin(self) -> None:
        """A micro-batch begins."""
        self._stamps.append(self._now())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out of the window what runs inside."""
        self._aside = [self._now()]
        yield
        self._aside.append(self._now())

    def drop(self) -> None:
        """The window was given up."""
        self._stamps.clear()
        self._aside.clear()

    def end(self) -> Stamped:
        """The step is done; returns what can be read later."""
        stamps, self._stamps = [*self._stamps, self._now()], []
        aside, self._aside = self._aside, []
        return Stamped(stamps, aside)

    def _now(self) -> _Stamp:
        event = stamp(self._device)
        return time.perf_counter() if event is None else event


class Stamped:
    """The stamps of a whole window."""

    def __init__(self, stamps: list[_Stamp], aside: list[_Stamp]) -> None:
        self._stamps, self._aside = stamps, aside

    def read(self) -> WindowSeconds:
        """Return the seconds; waits for the window's own end alone."""
        last = self._stamps[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        each = [_between(before, after) for before, after in itertools.pairwise(self._stamps)]
        return WindowSeconds(tuple(each[1:-1]), sum(each) - (_between(*self._aside) if self._aside else 0.0))


def _between(before: _Stamp, after: _Stamp) -> float:
    if isinstance(before, torch.cuda.Event):
        milliseconds: float = before.elapsed_time(after)
        return milliseconds / 1e3
    assert isinstance(after, float)
    return after - before
