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
        self._forget()

    def _forget(self) -> None:
        self._folder: Path | None = None
        self._layout: _Layout | None = None
        self._head, self._tree = bytearray(), bytearray()

    def verify(self, folder: Path) -> Manifest:
        """Do what `envelope.verify` does, which see; nothing is held of a folder that is not whole."""
        self._forget()
        try:
            manifest = envelope.verify(folder, self._room)
            if self._layout is not None and self._head != self._layout.head:
                raise damaged(folder, TENSORS, "bytes that were others a moment ago")
        except BaseException:
            self._forget()
            raise
        self._folder = folder
        return manifest

    def take(self, folder: Path) -> Taken | None:
        """Return the state of a folder that was verified last, once; None of any other, or where it is to be read."""
        taken = None
        if folder == self._folder and self._layout is not None:
            taken = Taken(bytes(self._tree), self._layout.tensors)
        self._forget()
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
        if length > _LONGEST_HEAD:
            return None
        head = os.pread(descriptor, _LENGTH_BYTES + length, 0)
        said = json.loads(head[_LENGTH_BYTES:])
        said.pop("__metadata__", None)
        in_turn = sorted(said.items(), key=lambda item: item[1]["data_offsets"])
        ends = [0, *(each["data_offsets"][1] for _, each in in_turn)]
        tensors = {name: _without_values(each, start) for start, (name, each) in zip(ends, in_turn, strict=False)}
        if len(head) == _LENGTH_BYTES + length and len(head) + ends[-1] == size:
            return _Layout(head, tensors)
    return None


def _without_values(said: Any, start: int) -> Tensor:
    """Return a tensor as a head says that it is, where its bytes begin as told.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError, RuntimeError: there is none such.
    """
    shape, dtype, (begin, end) = said["shape"], TYPES[said["dtype"]], said["data_offsets"]
    if begin != start or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("bytes that are no such tensor's")
    return torch.empty(shape, dtype=dtype, device="cpu")


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
