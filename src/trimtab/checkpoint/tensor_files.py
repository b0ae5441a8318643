"""Files of named tensors in safetensors format, without executable content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named, dense CPU tensors.

    Raises:
        SaveError: Writing failed.
        DependencyError: safetensors is not installed.
    """
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
    """Return all tensors of a file as copies, independent of later changes to the file.

    Raises:
        FormatError: The file is not a valid safetensors file.
        DependencyError: safetensors is not installed.
    """
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
