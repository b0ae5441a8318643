"""Record of `trimtab train`, with experiment trackers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.api import Metering
from trimtab.carbon.intensity import Intensity
from trimtab.checkpoint.config import Checkpoints
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.record import Header, RecordWriter
from trimtab.distributed.process_group import job_position
from trimtab.integrations.trackers import tracker_named
from trimtab.integrations.tracking import TrackedRecord


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a training run of a task or a function.

    Args:
        seed: seed of weights and data order.
        record: path of a new record, or of this run's record if resuming from checkpoints.
        metering: source of energy figures.
        checkpoints: checkpoint settings, or None.
        grid: carbon intensity in grams per kWh, for carbon figures.
        tracks: experiment trackers, in the format of `tracker_named`.
        nonfinite: policy for a non-finite loss or parameter, as in `trimtab.start`.
    """

    seed: int = 0
    record: Path | None = None
    metering: Metering | None = None
    checkpoints: Checkpoints | None = None
    grid: Intensity | None = None
    tracks: tuple[str, ...] = ()
    nonfinite: str = "error"

    @property
    def begins_record(self) -> bool:
        """True if the run starts a new record instead of continuing an existing record."""
        return self.record is not None and not self.record.exists()


def require_trackers(tracks: Sequence[str], record: Path | None) -> None:
    """Raise an error, before measuring, if a tracker cannot follow the record.

    Raises:
        ValueGivenError: there is no record, or an unknown tracker.
        DependencyError: the tracker's package is missing.
    """
    for each in tracks:
        tracker_named(each)
    if tracks and record is None:
        raise ValueGivenError(
            "--track",
            problem=f"--track {tracks[0]} needs a record, whose lines are sent to the tracker.",
            hint="Add --record run.jsonl.",
            code="option.required",
        )


def record_of(path: Path | None, header: Header, tracks: Sequence[str], *, continues: bool) -> RecordWriter | None:
    """Return the writer of a run's record, with trackers; None without a record and on ranks other than 0.

    Raises:
        FormatError: the file exists already or cannot be written.
    """
    if path is None or job_position().rank:
        return None
    try:
        if tracks:
            return TrackedRecord(path, header, [tracker_named(each) for each in tracks], continues=continues)
        return RecordWriter(path, header, continues=continues)
    except FileExistsError:
        raise FormatError(
            "--record",
            problem=f"The file {path} exists already.",
            hint="Name a new file, or delete the old one.",
            code="record.exists",
        ) from None
    except OSError as error:
        raise FormatError(
            "--record",
            problem=f"The record {path} cannot be written: {error.strerror or error}.",
            hint="Name another file.",
            code="record.not_writable",
        ) from None
