"""The checkpoints of a run in its folder: `step-N`, by how far the run was, and never by clocks."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.checkpoint.envelope import Manifest, remove, verify
from trimtab.core.errors import DamagedError

_NAME = re.compile(r"step-(\d{1,12})")


def name_of(windows: int) -> str:
    """Return the name of the checkpoint after so many windows."""
    return f"step-{windows}"


def committed(parent: Path) -> list[Path]:
    """Return the checkpoints there are, the furthest first; none has been looked at."""
    if not parent.is_dir():
        return []
    found = [
        (int(match[1]), Path(entry.path)) for entry in os.scandir(parent) if (match := _NAME.fullmatch(entry.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


@dataclass(frozen=True)
class Found:
    """The furthest checkpoint that is whole, if any.

    Args:
        refused: those that are further, and why they are not.
    """

    folder: Path | None = None
    manifest: Manifest | None = None
    refused: tuple[Refused, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Refused:
    """A checkpoint that is not whole."""

    folder: Path
    error: DamagedError

    def __str__(self) -> str:
        return str(self.error)


def newest_good(parent: Path) -> Found:
    """Return the furthest checkpoint of which every byte is as it was written."""
    refused: list[Refused] = []
    for folder in committed(parent):
        found = verified(folder)
        if isinstance(found, Manifest):
            return Found(folder, found, tuple(refused))
        refused.append(Refused(folder, found))
    return Found(refused=tuple(refused))


def verified(folder: Path) -> Manifest | DamagedError:
    """Return a checkpoint's manifest, or what is not whole of it."""
    try:
        return verify(folder)
    except DamagedError as error:
        return error


def put_aside(folder: Path) -> None:
    """Give a damaged checkpoint a name that none has."""
    os.rename(folder, folder.with_name(f"{folder.name}.damaged-{uuid.uuid4().hex[:8]}"))


def retain(parent: Path, keep_last: int) -> None:
    """Delete all but the last checkpoints; called once the last one is on disk."""
    for folder in committed(parent)[keep_last:]:
        remove(folder)
