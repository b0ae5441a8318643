"""Seconds that measuring takes of a window: the host's, or the device's where those are more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Spent:
    """Adds up spans of work; read once the device has done it.

    Attributes:
        host_s: seconds of the host amid the work that is measured. outside_s: those before and after it.
    """

    def __init__(self) -> None:
        self.host_s = self.outside_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._marks: list[tuple[float, int]] = []

    @contextlib.contextmanager
    def span(self, device: torch.device) -> Iterator[None]:
        """Charge what runs inside: seconds of the host, and of the device's stream."""
        start, begin = time.perf_counter(), stamp(device)
        try:
            yield
        finally:
            end = stamp(device)
            if begin is not None and end is not None:
                self._events.append((begin, end))
            self.host_s += time.perf_counter() - start

    def read(self) -> float:
        """Return the seconds; the device is past them, or is waited for."""
        return max(self.host_s + self.outside_s, self._device_s())

    def mark(self) -> None:
        """Remember what was spent up to here."""
        self._marks.append((self.host_s, len(self._events)))

    def amid(self, since: int | None = None) -> float:
        """Return the seconds that the measured work took longer, by its own clock: all, or from a mark to the last."""
        if since is None:
            return self._device_s() if self._events else self.host_s
        (start_s, start), (end_s, end) = self._marks[since], self._marks[-1]
        return self._device_s(slice(start, end)) if self._events else end_s - start_s

    def _device_s(self, which: slice = slice(None)) -> float:
        if self._events:
            self._events[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events[which]) / 1e3


def stamp(device: torch.device) -> torch.cuda.Event | None:
    """Return an event in the stream of work on a CUDA device, which need not be the current one; None elsewhere."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
