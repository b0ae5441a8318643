"""Device-synchronised wall-clock seconds, whole and split in phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue; nothing to do on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(function: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Return wall-clock seconds per call over `repeats` calls in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


class PhaseClock:
    """Adds up seconds by phase (data, forward, backward, optimizer); synchronises at every boundary.

    The synchronisation costs overlap on an accelerator, so phases are measured apart from throughput.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block under a name."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
