"""Scalars on their way from a device to the host: read a window later, when they have long arrived."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.measure.spent import stamp


class Late:
    """A copy of a small tensor to the host that nobody waits for until `read`."""

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
        """Return the values; waits for the copy alone, not for what the device was given since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._host.double().reshape(-1).tolist()
        return values
