"""A state as two files of a folder: what it is as JSON, its numbers beside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.file_names import TENSORS, TREE
from trimtab.checkpoint.manifest import open_file
from trimtab.checkpoint.read_once import Taken
from trimtab.checkpoint.tensor_files import read_tensors, write_tensors
from trimtab.checkpoint.tensors import Packer, Unpacker
from trimtab.checkpoint.tree import pack, unpack
from trimtab.core.errors import FormatError


def write_state(folder: Path, state: Mapping[str, Any], prefix: str = "") -> None:
    """Write a state as two files; its tensors must not change meanwhile.

    Args:
        prefix: of their names: several may lie in one folder.

    Raises:
        FormatError: it holds what cannot be written. SaveError, OSError: the file system says no. DependencyError:
            safetensors is not installed.
    """
    packer = Packer()
    packed = pack(state, packer.leaf)
    tensors, tree = folder / f"{prefix}{TENSORS}", folder / f"{prefix}{TREE}"
    write_tensors(tensors, packer.tensors)
    tree.write_text(json.dumps(packed, allow_nan=False), encoding="utf-8")
    tensors.chmod(tree.stat().st_mode)  # the library's files are their owner's alone, whatever the process was told


def digest_of(state: Any) -> str:
    """Return what two states have in common that would be written alike, to the bit, and no two others.

    Raises:
        FormatError: it holds what cannot be written.
    """
    packer = Packer()
    found = hashlib.sha256(json.dumps(pack(state, packer.leaf), allow_nan=False).encode())
    for tensor in packer.tensors.values():
        found.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def read_state(folder: Path, prefix: str = "", *, taken: Taken | None = None) -> Any:
    """Return a state that was written; its tensors are on the host. `verify` the folder first.

    Args:
        taken: what its files hold, where they were read already.

    Raises:
        FormatError: the files are no state. DependencyError: safetensors is not installed.
    """
    path = folder / f"{prefix}{TREE}"
    try:
        packed = json.loads((_bytes_of(path) if taken is None else taken.tree).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(str(path), given=f"what cannot be read ({error})", expected="a state") from None
    unpacker = Unpacker(read_tensors(folder / f"{prefix}{TENSORS}") if taken is None else taken.tensors)
    try:
        state = unpack(packed, unpacker.leaves)
    except RecursionError:
        raise FormatError(str(path), given="levels without end", expected="a state") from None
    unpacker.require_all_given()
    return state


def _bytes_of(path: Path) -> bytes:
    with open(open_file(path)[0], "rb") as file:
        return file.read()
