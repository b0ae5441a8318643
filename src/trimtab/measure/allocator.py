"""The C allocator's mode: whether large blocks are handed back to the system when they are freed.

A training step on CPU frees and asks again for the same activations. glibc maps blocks above 32 MiB freshly each time
and trims its heap, so every step pays page faults for memory the one before already had. "retain" keeps freed memory
in the process (`mallopt`): no number changes, and the process's resident memory stays at its peak between steps.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

from trimtab.core.errors import ValueGivenError

MODES = ("keep", "retain")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
Settings = dict[int, int]
# glibc's own thresholds grow with the blocks that are freed, up to these; a training loop reaches them in its first
# step. Setting any of these ends that growth for good, so "keep" after "retain" stands at the values it had reached.
_GROWN: Settings = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 64 * 2**20}
_NEVER_TRIM: Settings = {_M_TRIM_THRESHOLD: 2**31 - 1}
# (retain, keep) in the order they are tried. An older glibc refuses a threshold above 32 MiB: there no block is mapped
# at all, and "keep" allows glibc's own 65536 again.
_WAYS: tuple[tuple[Settings, Settings], ...] = (
    (_NEVER_TRIM | {_M_MMAP_THRESHOLD: 2**30}, _GROWN),
    (_NEVER_TRIM | {_M_MMAP_MAX: 0}, _GROWN | {_M_MMAP_MAX: 65536}),
)
_mode = MODES[0]


@functools.cache
def _libc() -> Any:
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)


@functools.cache
def _way() -> tuple[Settings, Settings] | None:
    """Return the settings of "retain" and "keep" that the C library takes, found by trying; None when it takes none."""
    if not hasattr(_libc(), "mallopt"):
        return None
    for retain, keep in _WAYS:
        taken = _set(retain)
        _set(keep)
        if taken:
            return retain, keep
    return None


def _set(settings: Settings) -> bool:
    """Set each parameter, also after one is refused; returns whether all were taken (`mallopt` returns 1)."""
    return [_libc().mallopt(*setting) for setting in settings.items()] == [1] * len(settings)


def can_retain() -> bool:
    """Return whether this process's C library lets the mode be set (glibc)."""
    return _way() is not None


def mode() -> str:
    """Return the mode as this module last set it: "keep" until then."""
    return _mode


def set_mode(wanted: str) -> None:
    """Set the mode; nothing happens when it is already so.

    Raises:
        ValueGivenError: the C library does not let it be set; nothing was changed.
    """
    global _mode
    if wanted == _mode:
        return
    way = _way()
    if way is None:
        given, expected = f"{wanted} on a C library that refuses it", "glibc with mallopt"
        raise ValueGivenError("allocator", given=given, expected=expected, way_out="Use keep.")
    retain, keep = way
    _set(retain if wanted == "retain" else keep)
    _mode = wanted
