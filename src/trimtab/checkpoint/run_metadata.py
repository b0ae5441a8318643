"""Metadata of a checkpointed run, read from the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.checkpoint.manifest import NAME, Manifest, damaged_error
from trimtab.core import validation
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.serialization import from_jsonable


@dataclass(frozen=True)
class RunMetadata:
    """Metadata of a run at a checkpoint.

    Args:
        step: Number of completed windows.
        rows: Number of consumed samples.
        world: Environment facts by name, see `world.world_of`.
        plan: Plan as JSON.
        in_shards: True if no rank held the complete state.
        accepted: Accepted environment changes since the run began, as text.
        noted: Environment changes that needed no acceptance, as text.
        finite: True if all parameters were finite.
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
        validation.integer("rows", self.rows, low=0)
        if "ranks" not in self.world:
            raise ValueGivenError("world", got="no entry 'ranks'", expected="the number of ranks")


@dataclass(frozen=True)
class SavedCheckpoint:
    """Checkpoint to resume from: quoted folder path and metadata."""

    folder: str
    said: RunMetadata


def said_of(folder: Path, manifest: Manifest) -> RunMetadata:
    """Return a folder's metadata.

    Raises:
        DamagedError: The metadata is not that of a run.
    """
    try:
        return from_jsonable(RunMetadata, dict(manifest.about))
    except (FormatError, ValueGivenError) as error:
        problem = f"The metadata in {folder / NAME} do not describe a run ({str(error).rstrip('.')})."
        raise damaged_error(folder, NAME, problem, "checkpoint.metadata_invalid") from None
