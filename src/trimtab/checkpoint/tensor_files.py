"""Files of named tensors, which hold numbers and nothing that runs (safetensors)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.checksums import Room
from trimtab.core.errors import DependencyError, FormatError, SaveError

# Types that every safetensors knows, by its names.
_TYPES = {
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
WRITTEN = frozenset(_TYPES.values())  # of any other type a file holds bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors that are on the host and dense.

    Raises:
        SaveError: they cannot be written. DependencyError: safetensors is not installed.
    """
    library = _library()
    try:
        library.torch.save_file(dict(tensors), path)
    except (library.SafetensorError, OSError) as error:
        given, expected = f"a file system that says: {error}", "room and leave to write"
        raise SaveError(str(path), given=given, expected=expected) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file, into memory of their own: what becomes of the file is nothing to them.

    Raises:
        FormatError: it is no such file, or says of itself what is not so. DependencyError: safetensors is missing.
    """
    library = _library()
    try:
        return {name: tensor.clone() for name, tensor in library.torch.load_file(path).items()}
    except (library.SafetensorError, OSError, ValueError, KeyError) as error:
        raise FormatError(str(path), given=f"what cannot be read ({error})", expected="a file of tensors") from None


class ReadOnce:
    """The tensors of one file, taken while its bytes are verified: so that they are read once, and copied once.

    Args:
        name: of the file. Of several that are verified the last one counts.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._path: Path | None = None
        self._tensors: dict[str, Tensor] = {}

    def room(self, path: Path, size: int) -> Room | None:
        """Return the tensors' memory, for whoever reads the file; None of another file, or one that is no such one."""
        if path.name != self._name:
            return None
        self._path, self._tensors = None, {}  # of a folder that was not whole, before there is memory for another
        tensors = _as_said(path)
        head = size - sum(tensor.nbytes for tensor in tensors.values())
        if not tensors or head < 0:
            return None
        self._path, self._tensors = path, tensors
        return Room([memoryview(bytearray(head)), *map(_bytes_of, tensors.values())])

    def read(self, path: Path) -> dict[str, Tensor]:
        """Return the tensors of a file, once: those that were taken, or as of `read_tensors`."""
        if path != self._path:
            return read_tensors(path)
        self._path, tensors, self._tensors = None, self._tensors, {}
        return tensors


def _as_said(path: Path) -> dict[str, Tensor]:
    """Return tensors as a file says that it holds them, in its order and without their values; none if it is odd."""
    library = _library()
    try:
        with library.safe_open(path, "numpy") as file:
            said = {name: file.get_slice(name) for name in file.offset_keys()}
            kinds = {name: (each.get_shape(), _TYPES[each.get_dtype()]) for name, each in said.items()}
    except (library.SafetensorError, OSError, ValueError, KeyError):
        return {}
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise DependencyError(
            "checkpoints",
            given="no safetensors",
            expected="the library that tensors are written with",
            way_out="pip install 'trimtab[checkpoint]'",
        ) from None
    return safetensors


def require_library() -> None:
    """Raise `DependencyError` where tensors cannot be written or read here."""
    _library()
