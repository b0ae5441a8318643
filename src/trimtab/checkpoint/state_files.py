"""A state as two files of a folder: what it is as JSON, its numbers beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.checkpoint.file_names import TENSORS, TREE
from trimtab.checkpoint.manifest import open_file
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


def read_state(folder: Path, prefix: str = "", read: Callable[[Path], dict[str, Tensor]] = read_tensors) -> Any:
    """Return a state that was written; its tensors are on the host. `verify` the folder first.

    Args:
        read: returns the tensors of a file.

    Raises:
        FormatError: the files are no state. DependencyError: safetensors is not installed.
    """
    path = folder / f"{prefix}{TREE}"
    try:
        with open(open_file(path)[0], encoding="utf-8") as file:
            packed = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(str(path), given=f"what cannot be read ({error})", expected="a state") from None
    unpacker = Unpacker(read(folder / f"{prefix}{TENSORS}"))
    try:
        state = unpack(packed, unpacker.leaves)
    except RecursionError:
        raise FormatError(str(path), given="levels without end", expected="a state") from None
    unpacker.require_all_given()
    return state
