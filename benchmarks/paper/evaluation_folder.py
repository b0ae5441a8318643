"""Folder of results of a machine. Results of different machines must not share a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from trimtab.core.errors import FormatError
from trimtab.core.serialization import write_whole

MACHINE_FILE = "machine.json"
MACHINE = ("cpu", "cpu_cores", "gpu", "os")  # keys of an environment that identify a machine
MOST_HOSTS = 99  # hosts with the same kind of GPU, each with a separate folder


def slug(found: Mapping[str, str], gpus: int = 0) -> str:
    """Return the machine part of a folder name: GPU and number of GPUs, or CPU with extensions and cores."""
    name = found["gpu"] if "gpu" in found else found["cpu"]
    words = re.sub(r"\((R|TM|r|tm)\)|\b(Processor|CPU|AMD|Intel|NVIDIA)\b", " ", name)
    parts = re.findall(r"[a-z0-9_]+", words.lower())
    number_of = f"x{gpus}" if "gpu" in found else f"{found['cpu_cores']}core"
    return "-".join([*parts, number_of])


def machine_of(folder: Path) -> dict[str, str]:
    """Return the recorded description of a folder's machine, {} if missing."""
    return _machine_of(folder) or {}


def own_folder(folder: Path, found: Mapping[str, str]) -> Path:
    """Return the first of `folder`, `folder-2`, `folder-3`, ... that is unused or belongs to this machine."""
    names = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, MOST_HOSTS + 1)))
    return next((each for each in names if _machine_of(each) in (None, _mine(found))), folder)


def claim(folder: Path, found: Mapping[str, str], *, writes: bool = True) -> None:
    """Record this machine as the owner of the folder.

    Args:
        folder: Folder of results.
        found: Description of this machine.
        writes: False to only check.

    Raises:
        FormatError: The folder belongs to another machine.
    """
    mine, theirs = _mine(found), _machine_of(folder)
    if theirs is None:
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / MACHINE_FILE, json.dumps(mine, indent=1))
    elif theirs != mine:
        differs = ", ".join(sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)))
        raise FormatError(str(folder), got=f"results of another {differs}", expected="those of this machine")


def _mine(found: Mapping[str, str]) -> dict[str, str]:
    return {key: found[key] for key in MACHINE if key in found}


def _machine_of(folder: Path) -> dict[str, str] | None:
    """Return the machine that owns the folder, None if unclaimed."""
    path = folder / MACHINE_FILE
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise FormatError(str(path), got=f"a damaged file ({error})", expected="a machine's facts") from None
