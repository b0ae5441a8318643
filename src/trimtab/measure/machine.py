"""What this machine is: device, versions, threads, and the peaks that utilisation is measured against."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import numpy
import torch

from trimtab.core.hardware import DeviceSpec, lookup_peaks
from trimtab.measure.timing import time_call

# The device types this package can time (`timing`), count bytes on (`memory`) and name the peaks of.
MEASURED = ("cpu", "cuda")
_LARGEST_MATMUL = 1024
_LONGEST_MATMUL_S = 0.06
_COPIED_BYTES = 64 * 2**20


def environment(*, has_gpu: bool | None = None) -> dict[str, str]:
    """Return versions and settings that a figure depends on; nothing that names a person, host or path.

    Args:
        has_gpu: whether a GPU was used, whose name initialises CUDA; None: where there is one.
    """
    found = {
        "trimtab": _own_version(),
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


def _own_version() -> str:
    """Return the installed version, or that of the sources where they are run without being installed."""
    try:
        return importlib.metadata.version("trimtab")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get("trimtab"), "__version__", "unknown"))


@functools.cache
def _own_sources() -> str:
    """Return the first twelve digits of the sha256 of this package's code, as it was first asked for."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def cpu_name() -> str:
    """Return the processor's own name, with the matrix extensions it has."""
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
    """Return a device's own name, without timing anything."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_spec(device: torch.device) -> DeviceSpec:
    """Return a device as it is known: a GPU's peaks from the table, a CPU's from matrix products timed here."""
    name = device_name(device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        row = lookup_peaks(name)
        if row is None:
            return DeviceSpec(name, "cuda", memory)
        return DeviceSpec(name, "cuda", memory, row.flops, row.bandwidth_bytes_s, row.source)
    peaks = measured_cpu_peaks(torch.get_num_threads())
    threads = torch.get_num_threads()
    source = f"fastest square matrix product timed on this machine, {threads} threads"
    return DeviceSpec(name, "cpu", _total_memory(), peaks, measured_cpu_bandwidth(threads), source, threads)


@functools.cache
def measured_cpu_peaks(num_threads: int) -> dict[str, float]:
    """Return FLOP/s of a square matrix product by dtype, at the current number of threads (the cache's key).

    A dtype without hardware support can be hundreds of times slower: sizes grow only while a product stays short.
    """
    state = torch.get_rng_state()
    dtypes = (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
    peaks = {name: _matmul_flops(dtype) for name, dtype in dtypes}
    torch.set_rng_state(state)
    return peaks


def _matmul_flops(dtype: torch.dtype) -> float:
    """Return the best FLOP/s over sizes 128 to 1024, as long as the next should take less than 60 ms."""
    best, size = 0.0, 128
    while size <= _LARGEST_MATMUL:
        left, right = (torch.rand(size, size).to(dtype) for _ in range(2))
        seconds = min(time_call(functools.partial(torch.mm, left, right), torch.device("cpu")) for _ in range(5))
        best = max(best, 2 * size**3 / seconds)
        if 2**3 * seconds > _LONGEST_MATMUL_S:
            break
        size *= 2
    return best


@functools.cache
def measured_cpu_bandwidth(num_threads: int) -> float:
    """Return bytes per second read and written by a copy too large for caches, at the current number of threads."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    copy()
    return 2 * _COPIED_BYTES / min(time_call(copy, torch.device("cpu")) for _ in range(5))


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
