"""Named tensors in a file that holds numbers and nothing that runs (safetensors)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.checkpoint.tree import Packer, unpack
from trimtab.core.errors import DependencyError, FormatError

TENSORS, TREE = "tensors.safetensors", "state.json"


def write_state(folder: Path, state: Mapping[str, Any], prefix: str = "") -> None:
    """Write a state as two files.

    Args:
        prefix: of their names: several may lie in one folder.

    Raises:
        FormatError: it holds what cannot be written. DependencyError: safetensors is not installed.
    """
    packer = Packer()
    packed = packer.pack(state)
    save = _library("save_file")
    save({name: _plain(tensor) for name, tensor in packer.tensors.items()}, folder / f"{prefix}{TENSORS}")
    (folder / f"{prefix}{TREE}").write_text(json.dumps(packed, allow_nan=False), encoding="utf-8")


def read_state(folder: Path, prefix: str = "") -> Any:
    """Return a state that was written; its tensors are on the host, and may lie in the file.

    Raises:
        FormatError: the files are no state. DependencyError: safetensors is not installed.
    """
    load = _library("load_file")
    try:
        packed = json.loads((folder / f"{prefix}{TREE}").read_text(encoding="utf-8"))
        tensors = load(folder / f"{prefix}{TENSORS}")
    except Exception as error:  # the library's own is a class of its own making
        raise FormatError(str(folder), given=f"what cannot be read ({error})", expected="a state") from None
    return unpack(packed, tensors)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor on the host that has its memory to itself, as the library wants it."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def require_library() -> None:
    """Raise `DependencyError` where states cannot be written or read here."""
    _library("save_file")


def _library(name: str) -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise DependencyError(
            "checkpoints",
            given="no safetensors",
            expected="the library that tensors are written with",
            way_out="pip install 'trimtab[checkpoint]'",
        ) from None
    return getattr(safetensors.torch, name)
