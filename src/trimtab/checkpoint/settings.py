"""Where a run is kept, how often, and what becomes of it where that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.checkpoint.envelope import committed
from trimtab.checkpoint.manifest import manifest_of
from trimtab.checkpoint.run_state import Given
from trimtab.checkpoint.said import Said, said_of
from trimtab.checkpoint.world import accepted
from trimtab.core import checks
from trimtab.core.codec import from_jsonable
from trimtab.core.errors import DamagedError, FormatError, ValueGivenError
from trimtab.core.plan import Plan

RESUMES = ("auto", "never", "always")
FAILURES = ("stop", "warn")


@dataclass(frozen=True)
class Checkpoints:
    """Keeps a run: `trimtab.start(..., checkpoints=Checkpoints("runs/mine"))`.

    Args:
        folder: of this run alone; made where its parent is there.
        every_steps: windows between two checkpoints. every_s: seconds, at the first end of a window after them; of
            several ranks by rank 0's clock, which is not looked at in each. Either, or both; None and None: by
            `run.checkpoint()` and at a signal only.
        keep_last: how many are kept; older ones are deleted once a newer one is on disk.
        resume: "auto" goes on from the newest one that is whole, and begins where there is none; "always" wants one;
            "never" wants a folder without.
        accepts: what may have changed since, by name: torch, threads, device, fp32, ranks, plan, optimizer
            (its class), data. Recorded.
        also: the user's own things that are part of the run (a scheduler, an average of weights), each with
            `state_dict()` and `load_state_dict()`.
        on_failure: of a save. "stop" raises; "warn" says so, trains on and tries again when the next one is due. So too
            of the record and of decisions, whose lines wait in memory.
        background: whether it is written beside the training, from a copy in memory.
        follows: the folder of a run that is to be repeated: windows are made as they were there.

    Raises:
        ValueGivenError: a value is out of range.
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
            raise ValueGivenError("checkpoints.folder", given=repr(self.folder), expected="a path")
        object.__setattr__(self, "folder", Path(self.folder))
        if self.every_steps is not None:
            checks.integer("checkpoints.every_steps", self.every_steps)
        if self.every_s is not None:
            checks.number("checkpoints.every_s", self.every_s, low=0, open_low=True)
        checks.integer("checkpoints.keep_last", self.keep_last)
        checks.one_of("checkpoints.resume", self.resume, RESUMES)
        checks.one_of("checkpoints.on_failure", self.on_failure, FAILURES)
        object.__setattr__(self, "accepts", accepted(self.accepts))
        Given(self.also)

    def saved_plan(self) -> Plan | None:
        """Return the plan that the run was last saved with; None where it was not saved yet.

        Raises:
            FormatError: it is of another version of trimtab, or cannot be read for now.
        """
        said = self._saved()
        return None if said is None else from_jsonable(Plan, said.plan)

    def saved_rows(self) -> int:
        """Return the rows that the run was last saved after; 0 where it was not saved yet."""
        said = self._saved()
        return 0 if said is None else said.rows

    def require_as_asked(self) -> None:
        """Raise where `resume` wants a checkpoint and there is none, or none and there is one; `start` looks closer.

        Raises:
            FormatError: as said.
        """
        there = committed(self.path)
        if self.resume == "always" and not there:
            raise FormatError(str(self.path), given="no checkpoint", expected="a checkpoint that is whole")
        if self.resume == "never" and there:
            given, way_out = f"{there[0].name} in {self.path}", 'resume="auto" goes on from it.'
            raise FormatError("checkpoints.resume", given=given, expected="a folder without any", way_out=way_out)

    def _saved(self) -> Said | None:
        if self.resume == "never":
            return None
        for folder in committed(self.path):
            with contextlib.suppress(DamagedError):
                return said_of(folder, manifest_of(folder))
        return None

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)
