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

MODES = ("keep", "retain")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc's own thresholds grow with the blocks that are freed, up to these; a training loop reaches them in its first
# step. Setting a threshold ends that growth for good, so "keep" after "retain" stands at the values it had reached.
_GROWN = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 64 * 2**20}
_RETAINED = {_M_MMAP_THRESHOLD: 2**30, _M_TRIM_THRESHOLD: 2**31 - 1}
_mode = MODES[0]


@functools.cache
def _libc() -> Any:
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)


def can_retain() -> bool:
    """Return whether this process's C library lets the mode be set (glibc)."""
    return hasattr(_libc(), "mallopt")


def mode() -> str:
    """Return the mode as this module last set it: "keep" until then."""
    return _mode


def set_mode(wanted: str) -> None:
    """Set the mode; nothing happens when it is already so."""
    global _mode
    if wanted == _mode:
        return
    for parameter, value in (_RETAINED if wanted == "retain" else _GROWN).items():
        _libc().mallopt(parameter, value)
    _mode = wanted
