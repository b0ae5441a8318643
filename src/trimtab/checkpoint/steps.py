"""The checkpoints of a run in its folder: `step-N`, by how far the run was."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from trimtab.checkpoint.envelope import DAMAGED, NAMED, verify
from trimtab.checkpoint.manifest import Manifest
from trimtab.core.errors import FormatError


def name_of(windows: int) -> str:
    """Return the name of the checkpoint after so many windows."""
    return f"step-{windows}"


def committed(parent: Path) -> list[Path]:
    """Return what is there by the name of a checkpoint, whole or not, the furthest first."""
    if not parent.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in parent.iterdir() if (match := NAMED.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def verified(folder: Path) -> Manifest | FormatError:
    """Return a checkpoint's manifest, or what is not whole of it."""
    try:
        return verify(folder)
    except FormatError as error:
        return error


def put_aside(folder: Path) -> None:
    """Give a damaged checkpoint a name that none has."""
    os.rename(folder, folder.with_name(f"{folder.name}{DAMAGED}{uuid.uuid4().hex[:8]}"))
