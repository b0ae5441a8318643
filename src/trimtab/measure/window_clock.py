"""When a window's loader batches are drawn and begin and when its step is done, on the device's own clock.

Nothing waits for the device: between two stamps in its stream it may have waited for the host, as while data is drawn.
"""

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
    """Seconds of each loader batch but the last, of the whole window, from its opening to its step, and of drawing."""

    batch_s: tuple[float, ...]
    window_s: float
    drawing_s: float


class WindowClock:
    """Stamps of one window; on CUDA events in the stream, read when they have passed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[_Stamp] = []
        self._aside: list[_Stamp] = []
        self._drawing: list[_Stamp] = []

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """What runs inside draws the batches of the next window."""
        start = self._now()
        yield
        self._drawing = [start, self._now()]

    def open(self) -> None:
        """The window begins."""
        self._stamps, self._aside = [self._now()], []

    def begin(self) -> None:
        """A loader batch begins."""
        self._stamps.append(self._now())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out of the window what runs inside."""
        self._aside = [self._now()]
        yield
        self._aside.append(self._now())

    def drop(self) -> None:
        """The window was given up, or is not measured."""
        for stamps in (self._stamps, self._aside, self._drawing):
            stamps.clear()

    def end(self) -> Stamped:
        """The step is done; returns what can be read later."""
        stamps, self._stamps = [*self._stamps, self._now()], []
        aside, self._aside = self._aside, []
        drawing, self._drawing = self._drawing, []
        return Stamped(stamps, aside, drawing)

    def _now(self) -> _Stamp:
        event = stamp(self._device)
        return time.perf_counter() if event is None else event


class Stamped:
    """The stamps of a whole window."""

    def __init__(self, stamps: list[_Stamp], *others: list[_Stamp]) -> None:
        self._stamps, self._others = stamps, others

    def wait(self) -> None:
        """Wait for the window's own end, which the host may be ahead of."""
        wait_for(self._stamps[-1])

    def read(self) -> WindowSeconds:
        """Return the seconds; waits for the window's own end alone."""
        self.wait()
        each = [seconds_between(before, after) for before, after in itertools.pairwise(self._stamps)]
        aside_s, drawing_s = (seconds_between(*both) if both else 0.0 for both in self._others)
        return WindowSeconds(tuple(each[1:-1]), sum(each) - aside_s, drawing_s)


def wait_for(stamp: _Stamp) -> None:
    """Wait until the device is past a stamp."""
    if isinstance(stamp, torch.cuda.Event):
        stamp.synchronize()


def seconds_between(before: _Stamp, after: _Stamp) -> float:
    """Return the seconds between two stamps of one clock; of events, which have passed."""
    if isinstance(before, torch.cuda.Event):
        milliseconds: float = before.elapsed_time(after)
        return milliseconds / 1e3
    assert isinstance(after, float)
    return after - before
