"""State as two files: structure as JSON, tensors as safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.manifest import open_file
from trimtab.checkpoint.state_file_names import TENSORS, TREE
from trimtab.checkpoint.state_json import pack, unpack
from trimtab.checkpoint.tensor_files import read_tensors, write_tensors
from trimtab.checkpoint.tensor_packing import Packer, Unpacker
from trimtab.checkpoint.verified_read import StateFiles
from trimtab.core.errors import FormatError


def write_state(folder: Path, state: Mapping[str, Any], prefix: str = "") -> None:
    """Write a state as two files. Its tensors must not change during the call.

    Args:
        folder: Target folder.
        state: State to write.
        prefix: Prefix of both file names.

    Raises:
        FormatError: The state contains an unsupported value.
        SaveError, OSError: Writing failed.
        DependencyError: safetensors is not installed.
    """
    packer = Packer()
    packed = pack(state, packer.leaf)
    tensors, tree = folder / f"{prefix}{TENSORS}", folder / f"{prefix}{TREE}"
    write_tensors(tensors, packer.tensors)
    tree.write_text(json.dumps(packed, allow_nan=False), encoding="utf-8")
    tensors.chmod(tree.stat().st_mode)  # safetensors sets owner-only permissions and ignores the umask


def digest_of(state: Any) -> str:
    """Return a SHA-256 of a state; equal digests mean bitwise equal files.

    Raises:
        FormatError: The state contains an unsupported value.
    """
    packer = Packer()
    found = hashlib.sha256(json.dumps(pack(state, packer.leaf), allow_nan=False).encode())
    for tensor in packer.tensors.values():
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_state(folder: Path, prefix: str = "", *, taken: StateFiles | None = None) -> Any:
    """Return a saved state with CPU tensors. Verify the folder first.

    Args:
        folder: Folder of the checkpoint.
        prefix: Prefix of both file names.
        taken: Contents of the files if they were read during verification.

    Raises:
        FormatError: The files are not a valid state.
        DependencyError: safetensors is not installed.
    """
    path = folder / f"{prefix}{TREE}"
    try:
        packed = json.loads((_bytes_of(path) if taken is None else taken.tree).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    unpacker = Unpacker(read_tensors(folder / f"{prefix}{TENSORS}") if taken is None else taken.tensors)
    try:
        state = unpack(packed, unpacker.leaves)
    except RecursionError:
        raise _unreadable(path, "too many nested levels") from None
    unpacker.require_all_given()
    return state


def _unreadable(path: Path, reason: str) -> FormatError:
    return FormatError(
        str(path),
        problem=f"{path} does not contain a readable checkpoint state ({reason}).",
        hint="Resume from another checkpoint.",
        code="state.unreadable",
    )


def _bytes_of(path: Path) -> bytes:
    with open(open_file(path)[0], "rb") as file:
        return file.read()
