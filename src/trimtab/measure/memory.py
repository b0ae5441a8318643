"""Peak bytes of a step: the allocator's statistics on CUDA, a count of allocated bytes on CPU.

CPU torch keeps no statistics. The profiler's allocation events, summed in time order on top of what was alive before,
count every byte torch's allocator hands out, scratch inside operators too; counted again, the peak repeats to about 1%.
It costs time, so memory is measured in a pass of its own. Nothing is written to standard error: torch's older profiler
is used, as the newer one (Kineto) logs every start and stop there, and the allocator's warnings are held back.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_ERROR = 2  # of the log levels of torch's C++ code: above warnings


def peak_bytes(step: Callable[[], object], device: torch.device, live: Callable[[], Iterable[Tensor]]) -> int:
    """Return peak bytes while `step` runs once.

    Args:
        step: one optimizer step, its state already materialised, no gradients left from the one before: on CPU, what
            was allocated before the count and is freed in it is not seen.
        live: returns the tensors alive before the step (parameters, buffers, optimizer state, batch); CPU only.

    Returns:
        On CUDA the peak of *reserved* memory, which is what runs out; on CPU bytes of `live` plus the peak on top.
    """
    if device.type == "cuda":
        gc.collect()  # loops that were let go and lie in cycles hold their model and its optimizer's state until then
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_reserved(device))
    return storage_bytes(live()) + peak_growth(step)


def forget_peak(device: torch.device) -> None:
    """Begin the peak on CUDA anew: what held it is over, and what is reserved beyond what is in use is given back."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def unused_bytes(device: torch.device) -> int | None:
    """Return how much of the last peak on CUDA no tensor was ever in: pieces too small for what was asked for.

    To be asked after `peak_bytes`; None on a device whose allocator has no pieces.
    """
    if device.type != "cuda":
        return None
    return int(torch.cuda.max_memory_reserved(device) - torch.cuda.max_memory_allocated(device))


def most_bytes(device: torch.device) -> float:
    """Return the bytes that this process may hold on a GPU: what is free or its own, as far as it was let have it."""
    free, whole = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free + torch.cuda.memory_reserved(device), share * whole)


def alive_between_steps(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what a model and its optimizer hold between two steps: parameters, buffers and the optimizer's state."""
    yield from model.parameters()
    yield from model.buffers()
    yield from state_tensors(optimizer)


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return bytes of the distinct storages behind some tensors; tensors on the meta device have none."""
    parts = (part for tensor in tensors for part in _strided_parts(tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts if not t.is_meta}
    return sum(storages.values())


def _strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory of one, of any layout."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.values(), tensor.offsets()) if tensor.layout is torch.jagged else (tensor,)


def peak_growth(step: Callable[[], object]) -> int:
    """Return the most bytes of CPU memory that a call held at once, beyond what was held before it.

    No profiler session may be active on the calling thread (`is_profiled`).
    """
    with _older_garbage_kept():
        events = _allocations(step)
    running = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        # The allocator may know a block's size from an earlier count, and report that it is freed in this one.
        running = max(0, running + size)
        peak = max(peak, running)
    return peak


def is_profiled() -> bool:
    """Return whether a profiler session is active on this thread: it would be ended, and its overhead timed."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


@contextlib.contextmanager
def _older_garbage_kept() -> Iterator[None]:
    """Have no garbage of before collected: what is freed so would be taken for memory that the call gave back.

    To collect all of it first takes a fifth of a second with torch's modules imported, of every count.
    """
    if gc.get_freeze_count():  # by somebody else, to whom it is left
        gc.collect()
        yield
        return
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hold back warnings of torch's C++ code, above all one about blocks that are older than a count.

    Errors are still written. Python warnings are not affected.
    """
    level = _log_level()
    before = level.value
    level.value = max(before, _ERROR)
    try:
        yield
    finally:
        level.value = before


def _log_level() -> ctypes.c_int:
    """Return torch's variable; one that nothing reads if this build of torch has none, as those with glog."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(0)


def _allocations(step: Callable[[], object]) -> list[tuple[float, int]]:
    """Return (time, signed bytes) of every CPU allocation event of a call."""
    with _without_warnings():
        if not hasattr(torch.autograd, "_enable_profiler_legacy"):  # torch announces that it will be removed
            return _allocations_by_kineto(step)
        autograd: Any = torch.autograd
        options: Any = torch._C._profiler
        config = options.ProfilerConfig(
            options.ProfilerState.CPU,
            False,  # shapes
            True,  # memory
            False,  # stacks
            False,  # FLOP
            False,  # modules
            options._ExperimentalConfig(),
        )
        autograd._enable_profiler_legacy(config)
        try:
            step()
        finally:
            threads = autograd._disable_profiler_legacy()
    first = next(event for events in threads for event in events)
    return [
        (first.cpu_elapsed_us(event), event.cpu_memory_usage())
        for events in threads
        for event in events
        if event.kind() == "memory_alloc"
    ]


def _allocations_by_kineto(step: Callable[[], object]) -> list[tuple[float, int]]:
    """Return the same by torch's newer profiler, which logs to standard error that it starts and stops."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    recorded.profiler = None  # all its events, which would stay: a profile refers to itself
    return [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
