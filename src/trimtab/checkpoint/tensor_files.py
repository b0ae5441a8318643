"""Files of named tensors, which hold numbers and nothing that runs (safetensors)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import DependencyError, FormatError, SaveError

# Types that every safetensors knows, by its names; of any other type a file holds bytes.
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
    except (library.SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise FormatError(str(path), given=f"what cannot be read ({error})", expected="a file of tensors") from None


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
