"""Mode of the C allocator: whether glibc returns freed blocks to the operating system.

A training step on a CPU frees and reallocates the same activations. glibc maps blocks above 32 MiB again for each
allocation and trims the heap, so every step pays page faults for memory it had before. The mode "retain" keeps freed
memory in the process (`mallopt`). Results do not change, and resident memory stays at its peak between steps.

No parameter is set until "retain" is requested. Setting a parameter permanently disables glibc's dynamic thresholds, so
"keep" after "retain" uses the highest values that glibc would reach.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from typing import Any

from trimtab.core.errors import ValueGivenError

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
_mode = MODES[0]
_way: tuple[Settings, Settings] | None = None  # (retain, keep), set at the first request


def can_retain() -> bool:
    """Return True if the C library is glibc and no environment variable configures its allocator."""
    is_set = any(os.environ.get(name) for name in _OWN_SETTINGS)
    is_set = is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return hasattr(_libc(), "mallopt") and not is_set


def mode() -> str:
    """Return the current mode, initially "keep"."""
    return _mode


def set_mode(wanted: str) -> None:
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
    _set(retain if wanted == "retain" else keep)
    _mode = wanted


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
    return ctypes.CDLL(None)
