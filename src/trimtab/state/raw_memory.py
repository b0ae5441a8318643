"""Snapshots of raw memory: `array.array`, and `ctypes` numbers, arrays and structures."""

from __future__ import annotations

import array
import ctypes
from typing import Any

_NUMBERS = set("bBhHiIlLqQfdgcu?")  # format codes of simple ctypes types without pointers
_OF_CTYPES = (ctypes.c_int.__mro__[1], ctypes.Array, ctypes.Structure)
MEMORY = (array.array, *_OF_CTYPES)  # classes that may hold raw values


def is_raw_memory(value: Any) -> bool:
    """Return True for an `array.array`, or a ctypes object without pointers."""
    return isinstance(value, array.array) or (isinstance(value, _OF_CTYPES) and _is_plain(type(value)))


def _is_plain(kind: Any) -> bool:
    if issubclass(kind, ctypes.Array):
        return _is_plain(kind._type_)
    if issubclass(kind, ctypes.Structure):
        return all(_is_plain(field[1]) for each in kind.__mro__ for field in vars(each).get("_fields_", ()))
    return getattr(kind, "_type_", None) in _NUMBERS


def bytes_of(value: Any) -> int:
    """Return the size in bytes."""
    return len(value) * value.itemsize if isinstance(value, array.array) else ctypes.sizeof(value)


class MemorySnapshot:
    """Snapshot of the bytes of an `array.array` or ctypes object."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.key = owner, id(owner)
        self._bytes = _bytes(owner)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return len(self._bytes)

    def again(self) -> MemorySnapshot:
        """Return a new snapshot of the object."""
        return MemorySnapshot(self.owner)

    def has_changed(self) -> bool:
        """Return True if the bytes differ."""
        return _bytes(self.owner) != self._bytes

    def restore(self) -> None:
        """Restore the bytes in place."""
        owner, now = self.owner, _bytes(self.owner)
        if now == self._bytes:
            return
        if not isinstance(owner, array.array):
            ctypes.memmove(ctypes.addressof(owner), self._bytes, len(self._bytes))
        elif len(now) == len(self._bytes):  # also works if a memoryview forbids resizing
            memoryview(owner).cast("B")[:] = self._bytes
        else:
            del owner[:]
            owner.frombytes(self._bytes)


def _bytes(owner: Any) -> bytes:
    if isinstance(owner, array.array):
        return owner.tobytes()
    return ctypes.string_at(ctypes.addressof(owner), ctypes.sizeof(owner))
