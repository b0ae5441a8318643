"""State files read during verification, so that bytes are read once and loaded exactly as verified.

safetensors memory-maps a file before its integrity is known, and an I/O error in a mapping kills the process. Therefore
this module parses the header itself from the descriptor under verification. Unusual files are left to safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.checkpoint import atomic_directory
from trimtab.checkpoint.checksums import FileBuffer
from trimtab.checkpoint.manifest import CHANGED, Manifest, damaged_error
from trimtab.checkpoint.state_file_names import TENSORS, TREE
from trimtab.checkpoint.tensor_files import TYPES

_LENGTH_BYTES = 8  # size of the header's length field, little-endian
_LONGEST_HEAD = 2**24  # enough for a hundred thousand tensors
_ODD = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


class StateFiles(NamedTuple):
    """Contents of the state files: JSON and the tensors by name."""

    tree: bytes
    tensors: dict[str, Tensor]


class _Layout(NamedTuple):
    """Header of a tensor file, and empty tensors in file order."""

    head: bytes
    tensors: dict[str, Tensor]


class VerifiedReader:
    """Verifies folders and caches the state of the last undamaged one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the cached state."""
        self._folder: Path | None = None
        self._layout: _Layout | None = None
        self._head, self._tree = bytearray(), bytearray()

    def verify(self, folder: Path) -> Manifest:
        """Verify a folder, cache its state and return the manifest. A damaged folder leaves the cache empty.

        Raises:
            DamagedError, OutOfReach, FormatError: See `envelope.verify`.
        """
        self.forget()
        try:
            manifest = atomic_directory.verify(folder, self._room)
            if self._layout is not None and self._head != self._layout.head:
                raise damaged_error(folder, TENSORS, f"{folder / TENSORS} changed while it was read.", CHANGED)
        except BaseException:
            self.forget()
            raise
        self._folder = folder
        return manifest

    def take(self, folder: Path) -> StateFiles | None:
        """Return and drop the cached state of `folder`, or None if it is not cached."""
        taken = None
        if folder == self._folder and self._layout is not None:
            taken = StateFiles(bytes(self._tree), self._layout.tensors)
        self.forget()
        return taken

    def _room(self, name: str, descriptor: int, size: int) -> FileBuffer | None:
        if name == TREE:
            self._tree = bytearray(size)
            return FileBuffer([memoryview(self._tree)])
        if name != TENSORS or (layout := _laid_out(descriptor, size)) is None:
            return None
        self._layout, self._head = layout, bytearray(len(layout.head))
        return FileBuffer([memoryview(self._head), *map(_bytes_of, layout.tensors.values())])


def _laid_out(descriptor: int, size: int) -> _Layout | None:
    """Parse the header of a tensor file of `size` bytes; None for an invalid or unusual header."""
    with contextlib.suppress(*_ODD):
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        if length > min(_LONGEST_HEAD, size):
            return None
        head = os.pread(descriptor, _LENGTH_BYTES + length, 0)
        said = json.loads(head[_LENGTH_BYTES:])
        said.pop("__metadata__", None)
        in_turn = dict(sorted(said.items(), key=lambda item: item[1]["data_offsets"]))
        end = 0
        for each in in_turn.values():
            end = _end_of(each, end)
        if len(head) == _LENGTH_BYTES + length and len(head) + end == size:  # checked before memory is allocated
            return _Layout(head, {name: _without_values(each) for name, each in in_turn.items()})
    return None


def _end_of(said: Any, start: int) -> int:
    """Return the end offset of a tensor that must begin at `start`.

    Raises:
        ValueError, TypeError, LookupError: The header is inconsistent.
    """
    (begin, end), shape = said["data_offsets"], said["shape"]
    is_one = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not is_one or begin != start or end - begin != math.prod(shape) * TYPES[said["dtype"]].itemsize:
        raise ValueError("the offsets do not match the tensor's shape and dtype")
    return int(end)


def _without_values(said: Any) -> Tensor:
    return torch.empty(said["shape"], dtype=TYPES[said["dtype"]], device="cpu")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
