"""Copies between a pretended device and host memory that take effect late, as on a stream of a GPU."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor


class LateCopies:
    """Stands in for `CudaTransfers`: a copy runs when its event is waited for, or at once, in the order of the calls.

    Attributes:
        log: calls, by number of the copy.
        errors: device memory that was freed before the compute stream waited for its copy.
        num_buffers: number of allocated host buffers.
        num_bytes: bytes copied to the host.
    """

    def __init__(self, *, is_late: bool = True) -> None:
        self.device = torch.device("cpu")
        self.log: list[str] = []
        self.errors: list[str] = []
        self.num_buffers = self.num_bytes = 0
        self._is_late, self._queue = is_late, list[tuple[int, bool, Tensor]]()
        self._devices: list[weakref.ref[Tensor]] = []
        self._waited: set[int] = set()

    def to_host(self, source: Tensor, host: Tensor) -> int:
        self.num_bytes += source.numel()
        return self._begin("to_host", source, host)

    def to_device(self, host: Tensor, num_bytes: int) -> tuple[Tensor, int]:
        target = torch.full((num_bytes,), 255, dtype=torch.uint8)  # NaN as a float
        return target, self._begin("to_device", target, host)

    def wait(self, event: int) -> None:
        self.log.append(f"wait {event}")
        self._waited.add(event)
        self._run_until(event)

    def hold(self, memory: Tensor) -> None:
        """Run the copies of some memory, which the allocator keeps until then."""
        event = max(number for number, device in enumerate(self._devices) if device() is memory)
        self._waited.add(event)
        self._run_until(event)

    def new_buffer(self, num_bytes: int) -> Tensor:
        self.num_buffers += 1
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def _begin(self, way: str, device: Tensor, host: Tensor) -> int:
        event = len(self._devices)
        self.log.append(f"{way} {event}")
        self._devices.append(weakref.ref(device, lambda _: self._freed(event)))
        self._queue.append((event, way == "to_host", host))
        if not self._is_late:
            self._run_until(event)
        return event

    def _freed(self, event: int) -> None:
        if event not in self._waited:
            self.errors.append(f"device memory freed before copy {event} was waited for")

    def _run_until(self, event: int) -> None:
        while self._queue and self._queue[0][0] <= event:
            number, is_to_host, host = self._queue.pop(0)
            if (device := self._devices[number]()) is not None:
                ends = (host, device) if is_to_host else (device, host)
                # Not an operator of torch: memory may be freed within a function transform.
                ctypes.memmove(*(each.data_ptr() for each in ends), device.numel())
