"""Whose folder of results it is: named for the machine, and refused to another."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from evaluation_figures import MACHINE_FILE

from trimtab.core.codec import write_whole
from trimtab.core.errors import FormatError
from trimtab.experiments.evaluation.result import MACHINE

MOST_HOSTS = 99  # of one kind of GPU, each with a folder of its own


def slug(found: Mapping[str, str], gpus: int = 0) -> str:
    """Return a machine's name as part of a folder's: its GPUs, or its processor with extensions and cores."""
    name = found["gpu"] if "gpu" in found else found["cpu"]
    words = re.sub(r"\((R|TM|r|tm)\)|\b(Processor|CPU|AMD|Intel|NVIDIA)\b", " ", name)
    parts = re.findall(r"[a-z0-9_]+", words.lower())
    number_of = f"x{gpus}" if "gpu" in found else f"{found['cpu_cores']}core"
    return "-".join([*parts, number_of])


def own_folder(folder: Path, found: Mapping[str, str]) -> Path:
    """Return the folder, or the first of `folder-2`, `folder-3`, ... that is no other machine's."""
    names = (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, MOST_HOSTS + 1)))
    return next((each for each in names if _machine_of(each) in (None, _mine(found))), folder)


def claim(folder: Path, found: Mapping[str, str], *, writes: bool = True) -> None:
    """Write down whose folder it is, or refuse one of another machine."""
    mine, theirs = _mine(found), _machine_of(folder)
    if theirs is None:
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / MACHINE_FILE, json.dumps(mine, indent=1))
    elif theirs != mine:
        differs = ", ".join(sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)))
        raise FormatError(str(folder), given=f"results of another {differs}", expected="those of this machine")


def _mine(found: Mapping[str, str]) -> dict[str, str]:
    return {key: found[key] for key in MACHINE if key in found}


def _machine_of(folder: Path) -> dict[str, str] | None:
    """Return the machine that a folder is of; None: no one's so far."""
    path = folder / MACHINE_FILE
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise FormatError(str(path), given=f"a damaged file ({error})", expected="a machine's facts") from None
