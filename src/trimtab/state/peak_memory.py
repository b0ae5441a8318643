"""Peak memory of a step: allocator statistics on CUDA, profiler events on CPU.

torch has no memory statistics for CPUs. The profiler's allocation events, summed in order on top of the memory alive
before, cover all memory from torch's allocator, including operator workspace. Repeated measurements agree to about 1%.
Profiling takes time, so memory is measured in a separate step. torch's legacy profiler is used, because the newer one
(Kineto) logs each start and stop to standard error; allocator warnings are suppressed too.
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

_ERROR = 2  # log level of torch's C++ code, above warnings


def peak_bytes(step: Callable[[], object], device: torch.device, live: Callable[[], Iterable[Tensor]]) -> int:
    """Return the peak memory in bytes while `step` runs once.

    Args:
        step: One optimizer step, with existing optimizer state and without gradients from an earlier step. On a CPU,
            freeing memory that was allocated before the measurement is not seen.
        device: Device of the step.
        live: Returns the tensors alive before the step (parameters, buffers, optimizer state, batch); CPU only.

    Returns:
        On CUDA the peak of *reserved* memory, the quantity that runs out; on a CPU the bytes of `live` plus the growth.
    """
    if device.type == "cuda":
        gc.collect()  # deleted loops in reference cycles would still hold a model and its optimizer state
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_reserved(device))
    return storage_bytes(live()) + peak_growth(step)


def forget_peak(device: torch.device) -> None:
    """Reset the peak statistics on CUDA and release unused reserved memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def unused_bytes(device: torch.device) -> int | None:
    """Return the reserved but never allocated part of the last CUDA peak in bytes (fragmentation).

    Call after `peak_bytes`. None on other devices.
    """
    if device.type != "cuda":
        return None
    return int(torch.cuda.max_memory_reserved(device) - torch.cuda.max_memory_allocated(device))


def most_bytes(device: torch.device) -> float:
    """Return the bytes available to this process on a GPU: free or reserved by it, within its memory fraction."""
    free, whole = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free + torch.cuda.memory_reserved(device), share * whole)


def alive_between_steps(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield the tensors held between two steps: parameters, buffers and optimizer state."""
    yield from model.parameters()
    yield from model.buffers()
    if optimizer is not None:
        yield from state_tensors(optimizer)


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of the distinct storages of tensors; meta tensors count 0."""
    parts = (part for tensor in tensors for part in _strided_parts(tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts if not t.is_meta}
    return sum(storages.values())


def _strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that hold the data of a tensor with any layout."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.layout is torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
    return (tensor,)


def peak_growth(step: Callable[[], object]) -> int:
    """Return the peak CPU memory of a call in bytes, minus the memory held before.

    No profiler session may be active on the calling thread (`is_profiled`).
    """
    with _older_garbage_kept():
        events = _allocations(step)
    running = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        # The allocator may report the free of a block that was allocated before the measurement.
        running = max(0, running + size)
        peak = max(peak, running)
    return peak


def is_profiled() -> bool:
    """Return True if a profiler session is active on this thread. Measuring memory would end the session."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


@contextlib.contextmanager
def _older_garbage_kept() -> Iterator[None]:
    """Exclude existing objects from garbage collection: freeing them would look like memory released by the call.

    A complete collection first would take 0.2 s per measurement with torch's modules imported.
    """
    if gc.get_freeze_count():  # frozen by other code, which must stay in control
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
    """Suppress warnings of torch's C++ code, mainly about blocks allocated before the measurement.

    C++ errors and Python warnings are unaffected.
    """
    level = _log_level()
    before = level.value
    level.value = max(before, _ERROR)
    try:
        yield
    finally:
        level.value = before


def _log_level() -> ctypes.c_int:
    """Return torch's log level variable, or an unused variable if this build (with glog) has none."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(0)


def _allocations(step: Callable[[], object]) -> list[tuple[float, int]]:
    """Return (time in us, signed bytes) of every CPU allocation event of a call."""
    with _without_warnings():
        # Torch has announced the removal of the legacy profiler.
        if not hasattr(torch.autograd, "_enable_profiler_legacy"):
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
    """Return the allocation events from torch's newer profiler, which logs start and stop to standard error."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    recorded.profiler = None  # frees the events: a profile refers to itself
    return [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
