"""A state taken while its files are verified, so that its bytes are read once, and are those that were verified.

The library that reads files of tensors maps them, before anybody knows that they are whole: a disk that fails under a
map ends the process. So their head is read here, from the very file that is verified; one that is odd is left to it.
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

from trimtab.checkpoint import envelope
from trimtab.checkpoint.checksums import Room
from trimtab.checkpoint.file_names import TENSORS, TREE
from trimtab.checkpoint.manifest import Manifest, damaged
from trimtab.checkpoint.tensor_files import TYPES

_LENGTH_BYTES = 8  # of the head's length, little-endian, before the head
_LONGEST_HEAD = 2**24  # of a hundred thousand tensors
_ODD = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


class Taken(NamedTuple):
    """A state as its files hold it: JSON, and the tensors that it names."""

    tree: bytes
    tensors: dict[str, Tensor]


class _Layout(NamedTuple):
    """The head of a file of tensors, and tensors as it says that they follow: in its order, without values."""

    head: bytes
    tensors: dict[str, Tensor]


class ReadOnce:
    """Verifies folders, and has the state of the last one that was whole."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Hold no state from here on."""
        self._folder: Path | None = None
        self._layout: _Layout | None = None
        self._head, self._tree = bytearray(), bytearray()

    def verify(self, folder: Path) -> Manifest:
        """Read every byte of a folder, and return its manifest; nothing is held of one that is not whole.

        Raises:
            DamagedError, OutOfReach, FormatError: as of `envelope.verify`.
        """
        self.forget()
        try:
            manifest = envelope.verify(folder, self._room)
            if self._layout is not None and self._head != self._layout.head:
                raise damaged(folder, TENSORS, "bytes that were others a moment ago")
        except BaseException:
            self.forget()
            raise
        self._folder = folder
        return manifest

    def take(self, folder: Path) -> Taken | None:
        """Return the state of a folder that was verified last, once; None of any other, or where it is to be read."""
        taken = None
        if folder == self._folder and self._layout is not None:
            taken = Taken(bytes(self._tree), self._layout.tensors)
        self.forget()
        return taken

    def _room(self, name: str, descriptor: int, size: int) -> Room | None:
        if name == TREE:
            self._tree = bytearray(size)
            return Room([memoryview(self._tree)])
        if name != TENSORS or (layout := _laid_out(descriptor, size)) is None:
            return None
        self._layout, self._head = layout, bytearray(len(layout.head))
        return Room([memoryview(self._head), *map(_bytes_of, layout.tensors.values())])


def _laid_out(descriptor: int, size: int) -> _Layout | None:
    """Return what a file of tensors of so many bytes says of itself; None where it is none, or an odd one."""
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
        if len(head) == _LENGTH_BYTES + length and len(head) + end == size:  # before memory is asked for
            return _Layout(head, {name: _without_values(each) for name, each in in_turn.items()})
    return None


def _end_of(said: Any, start: int) -> int:
    """Return where the bytes of a tensor end that begin as told.

    Raises:
        ValueError, TypeError, LookupError: a head says otherwise, or what no writer of it says.
    """
    (begin, end), shape = said["data_offsets"], said["shape"]
    is_one = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not is_one or begin != start or end - begin != math.prod(shape) * TYPES[said["dtype"]].itemsize:
        raise ValueError("bytes that are no such tensor's")
    return end


def _without_values(said: Any) -> Tensor:
    return torch.empty(said["shape"], dtype=TYPES[said["dtype"]], device="cpu")


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
