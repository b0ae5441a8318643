"""Device-synchronized wall-clock times, in total and by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of a CUDA device; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(function: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Return the mean wall-clock seconds per call over `repeats` consecutive calls."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


class PhaseClock:
    """Seconds by phase (data, forward, backward, optimizer), synchronized at each boundary.

    The synchronization prevents overlap on an accelerator, so phases are measured separately from throughput.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
