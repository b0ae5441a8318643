"""Copies on CUDA streams: the order of waits, copies and events, recorded on pretended streams."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trimtab.techniques.host_transfers import BufferPool, CudaTransfers


class Stream:
    """Stands in for a CUDA stream; logs calls by name."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"


class Copies(TorchFunctionMode):
    """Logs allocations and copies, with the current stream."""

    def __init__(self, log):
        super().__init__()
        self.log, self.streams = log, ["compute"]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("copy_", "empty"):
            is_async = " async" if (kwargs or {}).get("non_blocking") else ""
            self.log.append(f"{func.__name__} on {self.streams[-1]}{is_async}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch):
    log: list[str] = []
    with Copies(log) as copies:

        @contextlib.contextmanager
        def on(stream):
            copies.streams.append(stream.name)
            yield
            copies.streams.pop()

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute", log))
        monkeypatch.setattr(torch.cuda, "stream", on)
        yield log


def test_a_copy_to_the_host_follows_the_kernels_and_precedes_its_event(log):
    transfers = CudaTransfers(torch.device("cpu"))
    source, host = torch.arange(4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    event = transfers.to_host(source, host)
    assert log == ["side waits for compute", "copy_ on side async", "side records"]
    assert host.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    transfers.wait(event)
    assert log[3:] == ["compute waits for event of side"]


def test_held_memory_is_used_by_the_side_stream(log):
    streams: list[Stream] = []
    CudaTransfers(torch.device("cpu")).hold(SimpleNamespace(record_stream=streams.append))
    assert [each.name for each in streams] == ["side"]


def test_memory_for_a_copy_to_the_device_belongs_to_the_compute_stream(log):
    transfers, host = CudaTransfers(torch.device("cpu")), torch.arange(8, dtype=torch.uint8)
    target, event = transfers.to_device(host, 3)
    assert log == ["empty on compute", "side waits for compute", "copy_ on side async", "side records"]
    assert target.tolist() == [0, 1, 2]
    assert event == "event of side"


class Host:
    """Stands in for `CudaTransfers`: counts allocations."""

    count = 0

    def new_buffer(self, num_bytes):
        self.count += 1
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_buffers_are_reused_for_nearly_equal_sizes():
    host = Host()
    pool = BufferPool(host)
    first, second = pool.take(1000), pool.take(1024)
    assert first.numel() == second.numel() == 1024
    pool.give_back(first)
    assert pool.take(600) is first
    assert pool.take(512).numel() == 512
    assert host.count == 3
