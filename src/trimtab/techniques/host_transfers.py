"""Asynchronous copies between a CUDA device and pinned host memory, on a side stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.core.hardware import HostLink


class CudaTransfers:
    """Copies on a side stream; only the side stream and the compute stream wait, never the host.

    All copies run in the order of the calls, so a host buffer may be passed to the next copy at once. The compute
    stream is the stream that is current at a call.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)

    def to_host(self, source: Tensor, host: Tensor) -> Any:
        """Copy bytes to the beginning of a pinned buffer, and return the event of the copy's end.

        The caller must keep `source` until the compute stream waits for the event, or call `hold`: the allocator gives
        freed memory to the next kernel of the compute stream.
        """
        self._side.wait_stream(torch.cuda.current_stream(self.device))  # The kernel that computes the source.
        with torch.cuda.stream(self._side):
            host[: source.numel()].copy_(source, non_blocking=True)
        return self._side.record_event()

    def to_device(self, host: Tensor, num_bytes: int) -> tuple[Tensor, Any]:
        """Copy the first bytes of a pinned buffer to new device memory; return this memory and the event.

        The caller must keep the memory until the compute stream waits for the event, or call `hold`.
        """
        # Allocated for the compute stream, which frees the memory. Kernels queued there may still use its last content.
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            target.copy_(host[:num_bytes], non_blocking=True)
        return target, self._side.record_event()

    def wait(self, event: Any) -> None:
        """Make the compute stream wait for a copy."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def hold(self, memory: Tensor) -> None:
        """Keep device memory that is freed next from the allocator until all queued copies have ended."""
        memory.record_stream(self._side)

    def new_buffer(self, num_bytes: int) -> Tensor:
        """Allocate pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def measure_host_link(
    transfers: CudaTransfers, seconds_of: Callable[[Callable[[], object]], float], num_bytes: int = 2**26
) -> HostLink:
    """Return the bandwidth between the device and pinned host memory, in each direction alone.

    Args:
        seconds_of: returns the seconds of a call, including its copies.
        num_bytes: size of a copy.
    """
    source = torch.empty(num_bytes, dtype=torch.uint8, device=transfers.device)
    host = transfers.new_buffer(num_bytes)

    def fetch() -> None:
        memory, event = transfers.to_device(host, num_bytes)
        transfers.wait(event)
        del memory

    both = partial(transfers.to_host, source, host), fetch
    for copy in both:
        copy()  # The first copy allocates.
    to_host_s, to_device_s = (seconds_of(copy) for copy in both)
    return HostLink(num_bytes / to_host_s, num_bytes / to_device_s)


class BufferPool:
    """Pinned host buffers, reused from step to step because an allocation of pinned memory stops the device.

    Sizes are powers of two, as in torch's allocator of pinned memory, so that batches of unequal lengths share buffers.
    """

    def __init__(self, transfers: CudaTransfers) -> None:
        self._transfers = transfers
        self._free: dict[int, list[Tensor]] = {}

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer with at least a number of bytes."""
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else self._transfers.new_buffer(size)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back; copies that are queued already may still use it."""
        self._free[buffer.numel()].append(buffer)
