"""Description of this machine: devices, versions, threads and peak performance."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from trimtab.core.hardware import DeviceSpec, lookup_peaks
from trimtab.measure.timing import least_seconds, loaded_machine_clock

# Device types supported by `timing`, `memory` and the peak performance below.
MEASURED = ("cpu", "cuda")
_LARGEST_MATMUL = 1024
_LONGEST_MATMUL_S = 0.06
_COPIED_BYTES = 64 * 2**20


def own_cores() -> frozenset[int]:
    """Return the core numbers in this process's affinity mask, or all cores without affinity support."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def environment(*, has_gpu: bool | None = None) -> dict[str, str]:
    """Return versions and settings with an effect on measurements, without personal data, host names or paths.

    `has_gpu` includes the GPU's name, which initializes CUDA; None to include it if a GPU exists.
    """
    found = {
        "trimtab": str(getattr(sys.modules["trimtab"], "__version__", "unknown")),
        "sources": _own_sources(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available() if has_gpu is None else has_gpu:
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


@functools.cache
def _own_sources() -> str:
    """Return the first 12 digits of the SHA-256 of this package's source code, as of the first call."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def cpu_name() -> str:
    """Return the CPU's model name and matrix extensions."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown CPU"
    fields = dict(line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    flags = values.get("flags", "").split()
    extensions = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    return " ".join([values.get("model name", platform.processor() or "unknown CPU"), *extensions[:2]])


def device_name(device: torch.device) -> str:
    """Return the device's model name without a measurement."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_spec(device: torch.device) -> DeviceSpec:
    """Return a device's specification. GPU peaks come from a table, CPU peaks from timed matrix products."""
    name = device_name(device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        row = lookup_peaks(name)
        if row is None:
            return DeviceSpec(name, "cuda", memory)
        return DeviceSpec(name, "cuda", memory, row.flops, row.bandwidth_bytes_s, row.source)
    threads = torch.get_num_threads()
    peaks, bandwidth, source = _measured_cpu(threads)
    return DeviceSpec(name, "cpu", _total_memory(), peaks, bandwidth, source, threads, native_precisions())


def _measured_cpu(num_threads: int) -> tuple[dict[str, float], float, str]:
    """Return peak FLOP/s, bandwidth and the method of measurement.

    While other processes load the machine, fewer threads are timed by their processor time. Products scale with the
    number of threads where the processor has instructions for them; bandwidth, which threads share, scales about with
    its square root (1.4x from one thread to two, AMD EPYC).
    """
    with loaded_machine_clock(torch.device("cpu")) as fraction:
        timed = torch.get_num_threads()
        peaks, bandwidth = measured_cpu_peaks(timed), measured_cpu_bandwidth(timed)
    source = f"fastest square matrix product timed on this machine, {timed} threads"
    if fraction is None:
        return peaks, bandwidth, source
    factor, scaled = num_threads / timed, {"fp32", *native_precisions()}
    source += f" by processor time, scaled to {num_threads}, because other processes load the machine"
    peaks = {name: factor * flops if name in scaled else flops for name, flops in peaks.items()}
    return peaks, math.sqrt(factor) * bandwidth, source


@functools.cache
def measured_cpu_peaks(num_threads: int) -> dict[str, float]:
    """Return the peak FLOP/s of a square matrix product by dtype. The number of threads is the cache key.

    A dtype without hardware support can be hundreds of times slower, so sizes grow only while a product is fast.
    """
    state = torch.get_rng_state()
    dtypes = (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
    peaks = {name: _matmul_flops(dtype) for name, dtype in dtypes}
    torch.set_rng_state(state)
    return peaks


def _matmul_flops(dtype: torch.dtype) -> float:
    """Return the best FLOP/s over sizes 128 to 1024. Stops when the next size would take more than 60 ms."""
    best, size = 0.0, 128
    while size <= _LARGEST_MATMUL:
        left, right = (torch.rand(size, size).to(dtype) for _ in range(2))
        seconds = least_seconds(functools.partial(torch.mm, left, right), torch.device("cpu"))
        best = max(best, 2 * size**3 / seconds)
        if 2**3 * seconds > _LONGEST_MATMUL_S:
            break
        size *= 2
    return best


@functools.cache
def measured_cpu_bandwidth(num_threads: int) -> float:
    """Return the memory bandwidth in bytes/s (read plus write) of a copy larger than the caches."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    copy()
    return 2 * _COPIED_BYTES / least_seconds(copy, torch.device("cpu"))


def native_precisions() -> tuple[str, ...]:
    """Return the half precisions with matrix or vector instructions on this CPU."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    present = [name for name, found in capabilities.items() if found is True]
    return tuple(kind for kind in ("bf16", "fp16") if any(kind in name for name in present))


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
