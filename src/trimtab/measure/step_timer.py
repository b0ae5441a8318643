"""Times of a window: drawing data, start of each loader batch, and end of the optimizer step.

Times are CUDA events or host times and never synchronize the device. An interval between events includes time in which
the stream waits for the host, for example for data.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trimtab.measure.overhead_timer import stamp

_Stamp = float | torch.cuda.Event


@dataclass(frozen=True)
class StepSeconds:
    """Times of a window in seconds.

    Attributes:
        batch_s: Time of each loader batch but the last.
        window_s: Time from the opening of the window to the end of the step.
        drawing_s: Time for drawing the batches.
    """

    batch_s: tuple[float, ...]
    window_s: float
    drawing_s: float


class StepTimer:
    """Time stamps of a window; on CUDA, events that are read later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[_Stamp] = []
        self._aside: list[_Stamp] = []
        self._drawing: list[_Stamp] = []

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Time the drawing of the next window's batches."""
        start = self._now()
        yield
        self._drawing = [start, self._now()]

    def open(self) -> None:
        """Mark the start of a window."""
        self._stamps, self._aside = [self._now()], []

    def begin(self) -> None:
        """Mark the start of a loader batch."""
        self._stamps.append(self._now())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time inside the context from the window."""
        self._aside = [self._now()]
        yield
        self._aside.append(self._now())

    def drop(self) -> None:
        """Discard the stamps of a skipped or unmeasured window."""
        for stamps in (self._stamps, self._aside, self._drawing):
            stamps.clear()

    def end(self) -> StepTimeStamps:
        """Mark the end of the step, and return the stamps for later reading."""
        stamps, self._stamps = [*self._stamps, self._now()], []
        aside, self._aside = self._aside, []
        drawing, self._drawing = self._drawing, []
        return StepTimeStamps(stamps, aside, drawing)

    def _now(self) -> _Stamp:
        event = stamp(self._device)
        return time.perf_counter() if event is None else event


class StepTimeStamps:
    """Time stamps of a completed window."""

    def __init__(self, stamps: list[_Stamp], *others: list[_Stamp]) -> None:
        self._stamps, self._others = stamps, others

    def wait(self) -> None:
        """Wait for the end of the window on the device."""
        wait_for(self._stamps[-1])

    def read(self) -> StepSeconds:
        """Return the times; waits only for the end of this window."""
        self.wait()
        each = [seconds_between(before, after) for before, after in itertools.pairwise(self._stamps)]
        aside_s, drawing_s = (seconds_between(*both) if both else 0.0 for both in self._others)
        return StepSeconds(tuple(each[1:-1]), sum(each) - aside_s, drawing_s)


def wait_for(stamp: _Stamp) -> None:
    """Wait until the device has passed a time stamp."""
    if isinstance(stamp, torch.cuda.Event):
        stamp.synchronize()


def seconds_between(before: _Stamp, after: _Stamp) -> float:
    """Return the seconds between two time stamps of the same clock. Events must have completed."""
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event)
        milliseconds: float = before.elapsed_time(after)
        return milliseconds / 1e3
    assert isinstance(after, float)
    return after - before
