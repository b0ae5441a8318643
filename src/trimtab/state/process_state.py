"""Process-wide state that a training loop reads or changes: random generators and global modes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from trimtab.core.errors import ValueGivenError

# Mode of the C allocator: whether glibc returns freed blocks to the operating system.

MODES = ("keep", "retain")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
Settings = dict[int, int]
_GROWN: Settings = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 64 * 2**20}
_NEVER_TRIM: Settings = {_M_TRIM_THRESHOLD: 2**31 - 1}
# (retain, keep) in the order of attempts. An older glibc rejects thresholds above 32 MiB: then mapping is disabled
# completely, and "keep" restores glibc's default of 65536 mappings.
_WAYS: tuple[tuple[Settings, Settings], ...] = (
    (_NEVER_TRIM | {_M_MMAP_THRESHOLD: 2**30}, _GROWN),
    (_NEVER_TRIM | {_M_MMAP_MAX: 0}, _GROWN | {_M_MMAP_MAX: 65536}),
)
# Settings made by the user are left alone, because they could not be restored.
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_PARKED_BYTES = 32 * 2**20 + 2**12  # Larger blocks are mapped by a loop whose memory is returned.
_mode = MODES[0]
_parked: list[int] | None = None  # Blocks kept for the next use of "retain"; None outside of `separate_heaps`.
_way: tuple[Settings, Settings] | None = None  # (retain, keep), set at the first request


def can_retain() -> bool:
    """Return True if the C library is glibc and no environment variable configures its allocator."""
    is_set = any(os.environ.get(name) for name in _OWN_SETTINGS)
    is_set = is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return hasattr(_libc(), "mallopt") and not is_set


def allocator_mode() -> str:
    """Return the current mode, initially "keep"."""
    return _mode


def set_allocator_mode(wanted: str) -> None:
    """Set the mode, unless it is already set.

    Raises:
        ValueGivenError: The C library rejects the parameters.
    """
    global _mode, _way
    if wanted == _mode:
        return
    _way = _way or _found_way()
    if _way is None:
        raise ValueGivenError(
            "allocator",
            got=f'"{wanted}"',
            expected='"keep"',
            problem=f'allocator="{wanted}" needs glibc with its default allocator settings, and the C library of this '
            "process rejected it.",
            hint='Use allocator="keep".',
            code="allocator.unsupported",
        )
    retain, keep = _way
    if wanted == "retain":
        _set(retain)  # First, because freed blocks at the end of the heap would be trimmed.
        _free_parked()
    else:
        _set(keep | _NEVER_TRIM)
        _park()
        _set(keep)
    _mode = wanted


@contextlib.contextmanager
def separate_heaps() -> Iterator[None]:
    """Prevent loops with returned memory from reusing memory retained by loops in the same process.

    glibc maps a large block only if no free block fits. After a loop in mode "retain", a loop in mode "keep" would find
    blocks without page faults. Within this context, large free blocks are held back in mode "keep" and freed for
    "retain"; on exit, the operating system gets the memory back. The process may need the memory of both loops at the
    same time; the context holds back at most a quarter of the machine's memory.
    """
    global _parked
    if _parked is not None or not can_retain():
        yield
        return
    _parked = []
    try:
        yield
    finally:
        _free_parked()
        _parked = None
        if _mode == "keep":
            _libc().malloc_trim(0)


def _park() -> None:
    """Allocate all large free blocks of the heap; their pages stay in memory."""
    if _parked is None:
        return
    libc = _libc()
    before = libc.mallinfo().num_mapped
    most_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    while len(_parked) * _PARKED_BYTES < most_bytes:
        block = libc.malloc(_PARKED_BYTES)
        if block is None or libc.mallinfo().num_mapped != before:  # No free block was large enough.
            libc.free(block)
            return
        _parked.append(block)


def _free_parked() -> None:
    while _parked:
        _libc().free(_parked.pop())


class _MallocFacts(ctypes.Structure):
    """C's `struct mallinfo`."""

    _fields_ = (
        *((f"unused_{index}", ctypes.c_int) for index in range(3)),
        ("num_mapped", ctypes.c_int),  # Blocks mapped from the operating system.
        *((f"unused_{index}", ctypes.c_int) for index in range(4, 10)),
    )


def _found_way() -> tuple[Settings, Settings] | None:
    """Return the first (retain, keep) parameters accepted by the C library, or None."""
    for retain, keep in _WAYS if can_retain() else ():
        if _set(retain):
            return retain, keep
        _set(keep)
    return None


def _set(settings: Settings) -> bool:
    """Set all parameters, even after a rejected one; return True if all were accepted (`mallopt` returns 1)."""
    return [_libc().mallopt(*setting) for setting in settings.items()] == [1] * len(settings)


@functools.cache
def _libc() -> Any:
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo.restype = _MallocFacts
    return libc


_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn


@dataclass(frozen=True)
class ProcessState:
    """Snapshot of random generators (torch, Python, NumPy) and global modes (fp32, threads, gradients, allocator)."""

    cpu_rng: Tensor
    cuda_rng: tuple[Tensor, ...]
    python_rng: Any
    numpy_rng: Any
    fp32_modes: tuple[str, ...]
    num_threads: int
    grad_enabled: bool
    allocator: str
    older_tf32: tuple[bool | None, ...] = ()

    @classmethod
    def capture(cls, *, wakes_cuda: bool = True) -> ProcessState:
        """Return a snapshot of the current state.

        Args:
            wakes_cuda: True to include CUDA generators even if this initializes CUDA, after which the process must not
                fork.
        """
        asks_cuda = torch.cuda.is_available() and (wakes_cuda or torch.cuda.is_initialized())
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if asks_cuda else (),
            random.getstate(),
            numpy.random.get_state(),
            tuple(place.fp32_precision for place in fp32_places()),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            allocator_mode(),
            older_tf32(),
        )

    def restore(self) -> None:
        """Restore the state."""
        torch.set_rng_state(self.cpu_rng)
        if self.cuda_rng:
            torch.cuda.set_rng_state_all(list(self.cuda_rng))
        random.setstate(self.python_rng)
        numpy.random.set_state(self.numpy_rng)
        set_older_tf32(self.older_tf32)  # also writes some of the newer modes, so it comes first
        for place, mode in zip(fp32_places(), self.fp32_modes, strict=True):
            if place.fp32_precision != mode:
                place.fp32_precision = mode
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        torch.set_grad_enabled(self.grad_enabled)
        set_allocator_mode(self.allocator)


def convolves_in_tf32() -> bool:
    """Return True if fp32 convolutions on CUDA use TF32, which is torch's default."""
    return bool(_CUDNN.conv.fp32_precision != "ieee")


def fp32_places() -> tuple[Any, ...]:
    """Return the six torch objects with an `fp32_precision` attribute: three for CUDA, three for CPUs (mkldnn)."""
    return torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, _MKLDNN.matmul, _MKLDNN.conv, _MKLDNN.rnn


def hold_tf32() -> Callable[[], None]:
    """Allow TF32 in CUDA matmuls and convolutions; return a function that restores the global modes.

    The older flags are set too if they are readable: torch raises an error in any later reader, such as a compiler or
    trainer, when the older and newer flags disagree (pytorch/pytorch issue 166387).
    """
    places = (torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn)
    before, older = [place.fp32_precision for place in places], older_tf32()
    set_older_tf32([None if allowed is None else True for allowed in older])
    for place in places[:2]:
        if place.fp32_precision != "tf32":
            place.fp32_precision = "tf32"

    def undo() -> None:
        set_older_tf32(older)
        for place, mode in zip(places, before, strict=True):
            if place.fp32_precision != mode:
                place.fp32_precision = mode

    return undo


def older_tf32() -> tuple[bool | None, ...]:
    """Return torch's older `allow_tf32` flags for matmuls and cuDNN; None for a flag that torch refuses to read."""
    return tuple(map(_older_of, _older_flags()))


def set_older_tf32(allowed: Sequence[bool | None]) -> None:
    """Set the older `allow_tf32` flags that differ; None leaves a flag unchanged."""
    with warnings.catch_warnings():
        # Torch recommends the newer flags, but setting only these makes readers of the older ones fail.
        warnings.simplefilter("ignore")
        for flags, wanted in zip(_older_flags(), allowed, strict=False):
            if wanted is not None and _older_of(flags) != wanted:
                flags.allow_tf32 = wanted


def _older_flags() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.cudnn


def _older_of(flags: Any) -> bool | None:
    try:
        return bool(flags.allow_tf32)
    except RuntimeError:  # the newer flags disagree
        return None
