"""The C allocator's mode: whether large blocks are handed back to the system when they are freed.

A training step on CPU frees and asks again for the same activations. glibc maps blocks above 32 MiB freshly each time
and trims its heap, so every step pays page faults for memory the one before already had. "retain" keeps freed memory
in the process (`mallopt`): no number changes, and the process's resident memory stays at its peak between steps.

Nothing is set before "retain" is asked for. Setting ends for good that glibc's own thresholds grow with the blocks that
are freed; "keep" after "retain" stands at the highest they grow to.
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
# (retain, keep) in the order they are tried. An older glibc refuses a threshold above 32 MiB: there no block is mapped
# at all, and "keep" allows glibc's own 65536 again.
_WAYS: tuple[tuple[Settings, Settings], ...] = (
    (_NEVER_TRIM | {_M_MMAP_THRESHOLD: 2**30}, _GROWN),
    (_NEVER_TRIM | {_M_MMAP_MAX: 0}, _GROWN | {_M_MMAP_MAX: 65536}),
)
# What a user set is left as it is: it could not be put back.
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_mode = MODES[0]
_way: tuple[Settings, Settings] | None = None  # (retain, keep), once it was asked for


def can_retain() -> bool:
    """Return whether the mode may be set: the C library is glibc, and no variable has set its allocator already."""
    is_set = any(os.environ.get(name) for name in _OWN_SETTINGS)
    is_set = is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return hasattr(_libc(), "mallopt") and not is_set


def mode() -> str:
    """Return the mode as this module last set it: "keep" until then."""
    return _mode


def set_mode(wanted: str) -> None:
    """Set the mode; nothing happens when it is already so.

    Raises:
        ValueGivenError: the C library does not let it be set.
    """
    global _mode, _way
    if wanted == _mode:
        return
    _way = _way or _found_way()
    if _way is None:
        given, expected = f"{wanted} on a C library that refuses it", "glibc with mallopt"
        raise ValueGivenError("allocator", given=given, expected=expected, way_out="Use keep.")
    retain, keep = _way
    _set(retain if wanted == "retain" else keep)
    _mode = wanted


def _found_way() -> tuple[Settings, Settings] | None:
    """Return the settings of "retain" and "keep" that the C library takes, found by trying; None when it takes none."""
    for retain, keep in _WAYS if can_retain() else ():
        if _set(retain):
            return retain, keep
        _set(keep)
    return None


def _set(settings: Settings) -> bool:
    """Set each parameter, also after one is refused; returns whether all were taken (`mallopt` returns 1)."""
    return [_libc().mallopt(*setting) for setting in settings.items()] == [1] * len(settings)


@functools.cache
def _libc() -> Any:
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)
