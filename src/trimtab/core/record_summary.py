"""Compact summary of a run's record, read line by line: a long run takes a fraction of its file's size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.record import read_lines
from trimtab.core.record_lines import End, Evaluation, Event, Header, Line, RunRecord, StepRecord


def _numbers() -> array[float]:
    return array("d")


def _counts() -> array[int]:
    return array("q")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass
class StepColumns:
    """Steps of a run as columns: 56 bytes per step.

    NaN represents a missing figure, and 0 an unknown number of samples.
    """

    index: array[int] = field(default_factory=_counts)
    rows: array[int] = field(default_factory=_counts)
    num_micro_batches: array[int] = field(default_factory=_counts)
    wall_s: array[float] = field(default_factory=_numbers)
    loss: array[float] = field(default_factory=_numbers)
    learning_rate: array[float] = field(default_factory=_numbers)
    noise_scale: array[float] = field(default_factory=_numbers)
    num_skipped: int = 0
    has_unknown_samples: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, step: StepRecord) -> None:
        """Append a step."""
        self.index.append(step.index)
        self.rows.append(step.samples or 0)
        self.has_unknown_samples |= step.samples is None
        self.num_micro_batches.append(step.num_micro_batches)
        self.wall_s.append(step.wall_s)
        self.loss.append(step.loss)
        self.learning_rate.append(_or_nan(step.learning_rate))
        self.noise_scale.append(_or_nan(step.noise_scale))
        self.num_skipped += not step.applied

    def trained(self, from_index: int = 0) -> tuple[int, float]:
        """Return (samples, seconds) of the steps from an index on."""
        taken = [index >= from_index for index in self.index] if from_index else [True] * len(self)
        rows = sum(rows for rows, is_taken in zip(self.rows, taken, strict=True) if is_taken)
        return rows, math.fsum(s for s, is_taken in zip(self.wall_s, taken, strict=True) if is_taken)


@dataclass
class RunSummary:
    """Contents of a run's report.

    `last_evaluation` is None if there was none, and `end` is None if the run crashed.
    """

    header: Header
    steps: StepColumns = field(default_factory=StepColumns)
    events: list[Event] = field(default_factory=list)
    last_evaluation: Evaluation | None = None
    end: End | None = None

    def add(self, line: Line) -> None:
        """Add the next line of the record."""
        if isinstance(line, StepRecord):
            self.steps.add(line)
        elif isinstance(line, Event):
            self.events.append(line)
        elif isinstance(line, Evaluation):
            self.last_evaluation = line
        elif isinstance(line, End):
            self.end = line


def summary_of(record: RunRecord) -> RunSummary:
    """Return the summary of a record in memory."""
    ends: Iterable[Line] = () if record.end is None else (record.end,)
    found = RunSummary(record.header)
    for lines in (record.steps, record.evaluations, record.events, ends):
        for line in lines:
            found.add(line)
    return found


def read_summary(path: str | Path) -> RunSummary:
    """Read a run's record line by line.

    Raises:
        FormatError: as of `read_record`.
    """
    lines = read_lines(path)
    header = next(lines)
    assert isinstance(header, Header)  # `read_lines` raises otherwise.
    found = RunSummary(header)
    for line in lines:
        found.add(line)
    return found
