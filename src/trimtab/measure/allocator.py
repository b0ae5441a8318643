"""The C allocator's mode: whether large blocks are handed back to the system when they are freed.

A training step on CPU frees and asks again for the same activations. glibc maps blocks above 32 MiB freshly each time
and trims its heap, so every step pays page faults for memory the one before already had. "retain" keeps freed memory
in the process (`mallopt`): no number changes, and the process's resident memory stays at its peak between steps.

Nothing is set before "retain" is asked for. Setting ends for good that glibc's own thresholds grow with the blocks that
are freed; "keep" after "retain" stands where they had come to.
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
_NEVER_TRIM: Settings = {_M_TRIM_THRESHOLD: 2**31 - 1}
# (retain, and what "keep" sets beside the thresholds) in the order they are tried. An older glibc refuses a threshold
# above 32 MiB: there no block is mapped at all, and "keep" allows glibc's own 65536 again.
_WAYS: tuple[tuple[Settings, Settings], ...] = (
    (_NEVER_TRIM | {_M_MMAP_THRESHOLD: 2**30}, {}),
    (_NEVER_TRIM | {_M_MMAP_MAX: 0}, {_M_MMAP_MAX: 65536}),
)
# glibc's thresholds begin at this and grow up to that; what a program sets itself does not.
_LEAST, _MOST = 128 * 2**10, 32 * 2**20
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_mode = MODES[0]
_way: tuple[Settings, Settings] | None = None  # (retain, keep), once it was asked for


def can_retain() -> bool:
    """Return whether the mode may be set: this process's allocator is glibc's, and no variable has set it already."""
    is_set = any(os.environ.get(name) for name in _OWN_SETTINGS)
    is_set = is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return hasattr(_libc(), "mallopt") and not is_set and _mapped_blocks() is not None


def mode() -> str:
    """Return the mode as this module last set it: "keep" until then."""
    return _mode


def set_mode(wanted: str) -> None:
    """Set the mode; nothing happens when it is already so.

    Raises:
        ValueGivenError: the C library does not let it be set; it is as it was.
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
    stands = _thresholds() if can_retain() else None
    if stands is None:
        return None
    for retain, beside in _WAYS:
        if _set(retain):
            return retain, stands | beside
        _set(stands | beside)
    return None


def _set(settings: Settings) -> bool:
    """Set each parameter, also after one is refused; returns whether all were taken (`mallopt` returns 1)."""
    return [_libc().mallopt(*setting) for setting in settings.items()] == [1] * len(settings)


def _thresholds() -> Settings | None:
    """Return where glibc's thresholds stand, to 128 KiB; None where the blocks asked for are not glibc's.

    The smallest block that is mapped tells: it trims its heap at twice that. Upwards, since a mapped block, once freed,
    is where the threshold then stands.
    """
    for size in range(_LEAST, _MOST + _LEAST + 1, _LEAST):
        if _is_mapped(size):
            size = min(size, _MOST)
            return {_M_MMAP_THRESHOLD: size, _M_TRIM_THRESHOLD: 2 * size}
    return None


def _is_mapped(size: int) -> bool:
    libc, before = _libc(), _mapped_blocks()
    block = libc.malloc(size - 64)  # with what malloc adds, whole pages
    after = _mapped_blocks()
    libc.free(block)
    return before is not None and after is not None and after > before


def _mapped_blocks() -> int | None:
    """Return how many blocks glibc has mapped, each by itself; None where it cannot be asked."""
    for name in ("mallinfo2", "mallinfo"):  # glibc >= 2.33, and before
        if hasattr(_libc(), name):
            return int(getattr(_libc(), name)().hblks)
    return None


@functools.cache
def _libc() -> Any:
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_size_t,),
        (ctypes.c_void_p,),
    )
    for name, kind in (("mallinfo2", ctypes.c_size_t), ("mallinfo", ctypes.c_int)):
        if hasattr(libc, name):
            getattr(libc, name).restype = _info_of(kind)
    return libc


def _info_of(kind: Any) -> type[ctypes.Structure]:
    """Return the C library's `struct mallinfo`, ten numbers of one kind, of which the fourth is wanted."""
    others = [(f"_{i}", kind) for i in range(6)]
    fields = [("arena", kind), ("ordblks", kind), ("smblks", kind), ("hblks", kind), *others]
    return type("MallocInfo", (ctypes.Structure,), {"_fields_": fields})
