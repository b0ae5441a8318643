"""Overhead of measurements in seconds, on the host and on the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class OverheadTimer:
    """Timer of the overhead that measuring adds to a step, on the host and in the CUDA stream.

    Attributes:
        host_s: Host seconds of overhead during the measured work.
        outside_s: Host seconds of overhead before and after the measured work.
    """

    def __init__(self) -> None:
        self.host_s = self.outside_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._marks: list[tuple[float, int]] = []

    @contextlib.contextmanager
    def span(self, device: torch.device) -> Iterator[None]:
        """Time the context as overhead, on the host and in the device's stream."""
        start, begin = time.perf_counter(), stamp(device)
        try:
            yield
        finally:
            end = stamp(device)
            if begin is not None and end is not None:
                self._events.append((begin, end))
            self.host_s += time.perf_counter() - start

    def read(self) -> float:
        """Return the total overhead in seconds: the larger of host and device time. Waits for the device."""
        return max(self.host_s + self.outside_s, self._device_s())

    def mark(self) -> None:
        """Save the current overhead."""
        self._marks.append((self.host_s, len(self._events)))

    def amid(self, since: int | None = None) -> float:
        """Return the slow-down of the measured work in seconds, by the device's clock if there is one.

        Args:
            since: Index of a mark to start from, up to the last mark; None for the total.
        """
        if since is None:
            return self._device_s() if self._events else self.host_s
        (start_s, start), (end_s, end) = self._marks[since], self._marks[-1]
        return self._device_s(slice(start, end)) if self._events else end_s - start_s

    def _device_s(self, which: slice = slice(None)) -> float:
        if self._events:
            self._events[-1][1].synchronize()
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in self._events[which])
        return milliseconds / 1e3


def stamp(device: torch.device) -> torch.cuda.Event | None:
    """Record and return an event in the device's current stream; None for a device other than CUDA."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
