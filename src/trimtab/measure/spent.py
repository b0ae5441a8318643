"""Seconds that measuring takes of a window: the host's, or the device's where those are more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Spent:
    """Adds up spans of work; read once the device has done it."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

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
        if self._events:
            self._events[-1][1].synchronize()
        return max(self.host_s, sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3)


def stamp(device: torch.device) -> torch.cuda.Event | None:
    """Return an event in the stream of work on a CUDA device, which need not be the current one; None elsewhere."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
