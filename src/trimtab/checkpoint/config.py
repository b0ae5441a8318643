"""User settings for checkpoints: folder, interval, resuming and error handling."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.checkpoint.atomic_directory import committed_folders
from trimtab.checkpoint.compatibility import accepted_changes
from trimtab.checkpoint.manifest import RunMetadata, manifest_of, said_of
from trimtab.checkpoint.train_state import AdditionalState
from trimtab.core import validation
from trimtab.core.errors import DamagedError, FormatError, ValueGivenError
from trimtab.core.serialization import from_jsonable
from trimtab.plans.plan import Plan

RESUMES = ("auto", "never", "always")
FAILURES = ("stop", "warn")


@dataclass(frozen=True)
class Checkpoints:
    """Settings for saving a run: `trimtab.start(..., checkpoints=Checkpoints("runs/mine"))`.

    With `every_steps` and `every_s` both None, the run is saved only by `run.checkpoint()` and on a signal.

    Args:
        folder: Folder used by this run only; created if necessary.
        every_steps: Windows between two checkpoints.
        every_s: Seconds between two checkpoints; the save follows the next window. With several ranks, rank 0's clock
            counts, and it is not checked after every window.
        keep_last: Number of checkpoints to keep. Older ones are deleted after a newer one is on disk.
        resume: "auto" resumes from the newest undamaged checkpoint, or starts a new run if the folder has none;
            "always" requires a checkpoint; "never" requires a folder without checkpoints.
        accepts: Names of changes since the save that may affect results and are accepted (and recorded): torch,
            threads, device, fp32, ranks, plan, optimizer (its class), data.
        also: Further objects to save, by name, such as a scheduler or an average of the weights. Each needs
            `state_dict()` and `load_state_dict()`.
        on_failure: Reaction to a failed save. "stop" raises. "warn" warns, continues training and retries when the next
            save is due. Lines of the record and of the decision log wait in memory meanwhile.
        background: True to write in a thread during training, from a copy in CPU memory.
        follows: Folder of a run to repeat: batch-size decisions are read from its log.

    Raises:
        ValueGivenError: A value is out of range.
    """

    folder: Path | str
    every_steps: int | None = None
    every_s: float | None = 600.0
    keep_last: int = 2
    resume: str = "auto"
    accepts: tuple[str, ...] = ()
    also: Mapping[str, Any] = field(default_factory=dict)
    on_failure: str = "stop"
    background: bool = False
    follows: Path | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path) or not str(self.folder):
            hint = "Pass the folder in which this run keeps its checkpoints."
            raise ValueGivenError("checkpoints.folder", got=repr(self.folder), expected="a path", hint=hint)
        object.__setattr__(self, "folder", Path(self.folder))
        if self.every_steps is not None:
            validation.integer("checkpoints.every_steps", self.every_steps)
        if self.every_s is not None:
            validation.number("checkpoints.every_s", self.every_s, low=0, open_low=True)
        validation.integer("checkpoints.keep_last", self.keep_last)
        validation.one_of("checkpoints.resume", self.resume, RESUMES)
        validation.one_of("checkpoints.on_failure", self.on_failure, FAILURES)
        object.__setattr__(self, "accepts", accepted_changes(self.accepts))
        AdditionalState(self.also)

    def saved_plan(self) -> Plan | None:
        """Return the plan of the newest checkpoint, or None without a checkpoint.

        Raises:
            FormatError: The checkpoint belongs to another trimtab version, or is temporarily unreadable.
        """
        said = self._saved()
        return None if said is None else from_jsonable(Plan, said.plan)

    def saved_samples(self) -> int:
        """Return the number of samples consumed at the newest checkpoint, or 0 without a checkpoint."""
        said = self._saved()
        return 0 if said is None else said.rows

    def require_as_asked(self) -> None:
        """Check that `resume` matches the presence of checkpoints. Integrity is verified later, by `start`.

        Raises:
            FormatError: `resume` is "always" without a checkpoint, or "never" with one.
        """
        there = committed_folders(self.path)
        if self.resume == "always" and not there:
            raise FormatError(
                "checkpoints.resume",
                got="always",
                problem=f'resume="always" requires a checkpoint, but {self.path} contains none.',
                hint='Check the path, or use resume="auto" to start a new run if there is no checkpoint.',
                code="checkpoint.missing",
            )
        if self.resume == "never" and there:
            raise FormatError(
                "checkpoints.resume",
                got="never",
                problem=f'resume="never" requires a folder without checkpoints, but {self.path} contains '
                f"{there[0].name}.",
                hint='Choose another folder, or use resume="auto" to resume from the checkpoint.',
                code="checkpoint.exists",
            )

    def _saved(self) -> RunMetadata | None:
        if self.resume == "never":
            return None
        for folder in committed_folders(self.path):
            with contextlib.suppress(DamagedError):
                return said_of(folder, manifest_of(folder))
        return None

    @property
    def path(self) -> Path:
        """The folder as a `Path`."""
        return Path(self.folder)
