"""Asynchronous copies of scalars from device to host, read a window later without a synchronization."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.measure.overhead_timer import stamp


class AsyncScalar:
    """Asynchronous host copy of a small tensor (pinned memory, non-blocking)."""

    def __init__(self, values: Tensor) -> None:
        values = values.detach()
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = stamp(values.device)
        else:
            self._host = values

    def read(self) -> list[float]:
        """Return the values. Waits only for the copy, not for later work on the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._host.double().reshape(-1).tolist()
        return values
