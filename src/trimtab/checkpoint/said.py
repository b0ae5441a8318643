"""What the folder of a run says of it beside its files, read as what it has to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.checkpoint.manifest import NAME, Manifest, damaged
from trimtab.core import checks
from trimtab.core.codec import from_jsonable
from trimtab.core.errors import FormatError, ValueGivenError


@dataclass(frozen=True)
class Said:
    """A run where it was saved.

    Args:
        step: windows. rows: samples. world: what must be as it was, by name. plan: as JSON. in_shards: whether no rank
            held the whole. accepted: what had changed since the run began and was accepted, in words. noted: what had
            changed and is refused for nothing. finite: whether every parameter was finite.
    """

    step: int
    rows: int
    world: Mapping[str, str]
    plan: Mapping[str, Any]
    in_shards: bool
    accepted: Mapping[str, str]
    noted: Mapping[str, str] = field(default_factory=dict)
    finite: bool = True

    def __post_init__(self) -> None:
        checks.integer("rows", self.rows, low=0)
        if "ranks" not in self.world:
            raise ValueGivenError("world", given="no ranks", expected="their number")


@dataclass(frozen=True)
class Saved:
    """What a run goes on from: its folder, quoted, and what that says."""

    folder: str
    said: Said


def said_of(folder: Path, manifest: Manifest) -> Said:
    """Return what a folder says of its run.

    Raises:
        DamagedError: it is none of a run, or says what no run does.
    """
    try:
        return from_jsonable(Said, dict(manifest.about))
    except (FormatError, ValueGivenError) as error:
        raise damaged(folder, NAME, f"what no run says of itself ({error})") from None
