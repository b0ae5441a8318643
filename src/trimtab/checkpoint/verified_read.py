"""State files read during verification, so that bytes are read once and loaded exactly as verified.

safetensors memory-maps a file before its integrity is known, and an I/O error in a mapping kills the process. Therefore
this module parses the header itself from the descriptor under verification. Unusual files are left to safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.checkpoint import atomic_directory
from trimtab.checkpoint.manifest import CHANGED, TENSORS, TREE, FileBuffer, Manifest, damaged_error
from trimtab.core.errors import DependencyError, FormatError, SaveError

# Dtypes known to every version of safetensors, by its names. Tensors of other dtypes are stored as bytes.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
WRITTEN = frozenset(TYPES.values())
_LENGTH_BYTES = 8  # size of the header's length field, little-endian
_LONGEST_HEAD = 2**24  # enough for a hundred thousand tensors
_ODD = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named, dense CPU tensors; `SaveError` if writing failed, `DependencyError` without safetensors."""
    library = _library()
    try:
        library.torch.save_file(dict(tensors), path)
    except (library.SafetensorError, OSError) as error:
        raise SaveError(
            str(path),
            got=str(error),
            problem=f"{path} could not be written ({error}).",
            hint="Free space on the disk and check that the folder is writable; earlier checkpoints are intact.",
        ) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return copies of a file's tensors; `FormatError` for an invalid file, `DependencyError` without safetensors."""
    library = _library()
    try:
        return {name: tensor.clone() for name, tensor in library.torch.load_file(path).items()}
    except (library.SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise FormatError(
            str(path),
            problem=f"{path} is not a readable safetensors file ({error}).",
            hint="Resume from another checkpoint.",
            code="state.unreadable",
        ) from None


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise DependencyError(
            "checkpoints",
            problem="Checkpoints need the package safetensors, which is not installed.",
            hint="Install it: pip install 'trimtab[checkpoint]'.",
        ) from None
    return safetensors


def require_library() -> None:
    """Raise `DependencyError` if safetensors is not installed."""
    _library()


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
        """Verify a folder as `atomic_directory.verify`, and cache its state; nothing is cached of a damaged folder."""
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
    """Return the end offset of a tensor that must begin at `start`."""
    (begin, end), shape = said["data_offsets"], said["shape"]
    is_one = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not is_one or begin != start or end - begin != math.prod(shape) * TYPES[said["dtype"]].itemsize:
        raise ValueError("the offsets do not match the tensor's shape and dtype")
    return int(end)


def _without_values(said: Any) -> Tensor:
    return torch.empty(said["shape"], dtype=TYPES[said["dtype"]], device="cpu")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
