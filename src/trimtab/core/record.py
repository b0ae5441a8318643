"""The record of a run as JSON lines: a header, then steps, evaluations and events, then an end.

An incomplete last line (from a crash while writing) is dropped on reading; further damage raises.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from trimtab.core import validation
from trimtab.core.errors import FormatError, RecordExistsError, ValueGivenError
from trimtab.core.files import (
    LINE_BYTES,
    RECORD_BYTES,
    AppendOnlyFile,
    not_written,
    open_regular,
    sync,
    too_large,
    unreadable_error,
)
from trimtab.core.serialization import from_jsonable, parse, to_jsonable

RECORD_SCHEMA = 3
_MOST = 2**62  # Limit of a count.


@dataclass(frozen=True)
class StepRecord:
    """An optimizer step, applied or skipped.

    Args:
        index: number of earlier steps.
        samples: samples in the window; None if unknown.
        terms: number of terms that the loss averages over.
        loss: mean loss per term.
        learning_rate: learning rate applied to the first parameter group; None if the optimizer computes its own, as
            Adafactor does.
        wall_s: seconds since the previous step.
        applied: True if the optimizer stepped.
        grad_norm, loss_scale: None if not computed.
        num_micro_batches: k of the window.
        noise_scale: gradient noise scale N in samples, if measured.
    """

    index: int
    samples: int | None
    terms: float
    loss: float
    learning_rate: float | None
    wall_s: float
    applied: bool = True
    grad_norm: float | None = None
    loss_scale: float | None = None
    num_micro_batches: int = 1
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        validation.not_negative(self, "index", "samples", "terms", "wall_s", "num_micro_batches")
        if max(self.index, self.samples or 0, self.num_micro_batches) > _MOST:
            given = f"index={self.index}, rows={self.samples}, num_micro_batches={self.num_micro_batches}"
            raise ValueGivenError("StepRecord", got=given, expected="at most 2**62", code="number.range")


@dataclass(frozen=True)
class Evaluation:
    """A held-out evaluation: after `samples` samples and `train_s` seconds of training (evaluation time excluded)."""

    samples: int
    train_s: float
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        validation.not_negative(self, "samples", "train_s")


@dataclass(frozen=True)
class Event:
    """An event of the run with figures.

    Args:
        name: kind of the event.
        step: index of the next window, or another count that the kind defines.
        detail: figures of the event.
    """

    name: str
    step: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validation.not_negative(self, "step")


@dataclass(frozen=True)
class Header:
    """First line: name, plan and environment of the run.

    Args:
        name: the user's name for the run.
        seed: random seed, if any.
        plan: the plan as JSON; None without a plan.
        environment: versions, machine and threads, from `trimtab.measure.machine`.
        detail: further named values for readers of the record.
    """

    name: str
    seed: int | None = None
    plan: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)
    schema: int = RECORD_SCHEMA


@dataclass(frozen=True)
class End:
    """Last line: reason for the end of the run, and totals.

    Args:
        reason: "closed", "error", a `StopReason`, or a reason set by the writing loop.
    """

    reason: str
    detail: Mapping[str, Any] = field(default_factory=dict)


Line = Header | StepRecord | Evaluation | Event | End
_KINDS: dict[str, type[Any]] = {
    "header": Header,
    "step": StepRecord,
    "evaluation": Evaluation,
    "event": Event,
    "end": End,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


@dataclass(frozen=True)
class RunRecord:
    """A whole run in memory. `end` is None for a run that crashed."""

    header: Header
    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[Event, ...] = ()
    end: End | None = None


def encode_line(line: Line) -> bytes:
    """Return a record line as JSON bytes."""
    data = {"kind": _NAMES[type(line)]} | to_jsonable(line)
    return (json.dumps(data, allow_nan=False, ensure_ascii=False) + "\n").encode()


def parsed(where: str, line: bytes) -> Line:
    try:
        data = parse(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(
            where, got=f"a damaged line ({error})", expected="one JSON object per line", code="record.damaged_line"
        ) from None
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise FormatError(
            where, got=f"kind={kind!r}", expected="one of " + ", ".join(_KINDS), code="record.damaged_line"
        )
    try:
        line_value: Line = from_jsonable(_KINDS[kind], data)  # Refuses a header of another schema.
    except RecursionError:
        given, expected = "JSON that is nested too deeply", "a line of a record"
        raise FormatError(where, got=given, expected=expected, code="json.value") from None
    except (FormatError, ValueGivenError) as error:
        texts = {"got": error.got, "expected": error.expected, "hint": error.hint, "code": error.code}
        problem = f"{where}: {error.problem}" if error.problem else ""
        raise FormatError(f"{where}: {error.field}", problem=problem, **texts) from None
    return line_value


SOURCES = "sources"  # Key of the environment: version of this package's source code.
_BEGUN = b'{"kind": "header"'
_NO_RECORD = "a file that is not a run's record"
# Fields of a plan, in addition to its choices, that distinguish runs.
_SETTINGS = ("batch_size", "num_ranks", "batch_rule", "recompute_blocks")


def _there(path: str | Path, error: FileExistsError) -> FormatError:
    made = RecordExistsError(
        "record",
        got=f"the existing file {path}",
        problem=f"The record {path} exists already.",
        hint="Choose a new path, or resume the run that wrote the record: RecordWriter(path, header, continues=True).",
    )
    made.errno = error.errno
    return made


class RecordWriter:
    """Appends lines to a record file. Only whole lines are written, even if the disk is full.

    Args:
        path: a new file; an existing one is accepted only with `continues`.
        header: header of the run.
        continues: True to reopen an existing file. A resumed run keeps the lines up to its checkpoint (`keep`). A run
            that starts from scratch overwrites an empty file or its own earlier record; a record with another plan is
            renamed to `NAME.1` first.

    Raises:
        FormatError: the file exists, and `continues` is False (also a `FileExistsError`).
        InUseError: another writer, of this process or another, has the file open.
        OSError: the file cannot be created.
    """

    def __init__(self, path: str | Path, header: Header, *, continues: bool = False) -> None:
        try:
            self._file = AppendOnlyFile(Path(path), is_new=not continues, is_exclusive=True)
        except FileExistsError as error:
            raise _there(path, error) from None
        self._header, self._is_named = header, False
        # True while the run has neither started nor resumed here: the file is still unchanged.
        self.is_open_ended = continues
        if not continues:
            self.write(header)

    def end(self) -> int:
        """Write all lines to disk and return the file's size in bytes; `SaveError` as of `flush`."""
        self._begin()
        size = self._file.sync()
        if not self._is_named:
            try:
                sync(self._file.path.parent)
            except OSError as error:
                raise not_written(self._file.path, error) from error
            self._is_named = True
        return size

    def keep(self, end: int) -> None:
        """Drop everything after the first `end` bytes, which the resumed run will write again.

        Raises:
            FormatError: the file is shorter, no line ends there, or the record belongs to another run.
        """
        path = self._file.path
        require_own(path, self._header)
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            last = file.read(1)
        if size < end or last != b"\n":
            given = f"a record of {size} bytes" if size < end else f"a line that continues after byte {end}"
            raise FormatError(
                str(path),
                got=given,
                expected=f"the record that the checkpoint was saved with, with a complete line at byte {end}",
                hint="Pass the record that the checkpointed run wrote, or resume without a record.",
                code="record.truncated",
            )
        self._file.cut(end)
        self.is_open_ended = False

    def require_own(self) -> None:
        """Raise `FormatError` if a run that starts would overwrite a foreign file."""
        if self.is_open_ended:
            require_own(self._file.path, self._header)

    def _begin(self) -> None:
        """Write the header of a run that starts, over its own earlier record."""
        if self.is_open_ended:
            self.require_own()
            if _is_of_another_plan(self._file.path, self._header):
                self._set_aside()
            self._file.cut(0)
            self.is_open_ended = False
            self.write(self._header)

    def _set_aside(self) -> None:
        """Rename the existing record: an interrupted run that was planned again may have another plan."""
        path = self._file.path
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        aside = next(each for each in names if not os.path.lexists(each))
        self._file.set_aside(aside)
        message = (
            f"{path} is the record of a run with another plan. It was renamed to {aside.name}; a new one is started."
        )
        warnings.warn(message, stacklevel=5)

    def write(self, line: Line) -> None:
        """Append a line, kept in memory until the next `flush`, and longer if the disk is full.

        Raises:
            FormatError: it would be the first line of a run in a foreign file.
        """
        self._begin()
        self._file.write(encode_line(line))

    def flush(self) -> None:
        """Write buffered lines to the operating system.

        Raises:
            SaveError: not everything was written. Earlier lines are complete, and the rest is retried.
        """
        self._file.flush()

    def close(self) -> None:
        """Flush and close; may be called twice.

        Raises:
            SaveError: the flush failed; the unwritten lines are lost.
        """
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def write_record(path: str | Path, record: RunRecord) -> None:
    """Write the record of a whole run to a new file."""
    with RecordWriter(path, record.header) as writer:
        body: tuple[Line, ...] = (*record.steps, *record.evaluations, *record.events)
        for line in body if record.end is None else (*body, record.end):
            writer.write(line)


def require_own(path: Path, own: Header, field: str = "") -> None:
    """Raise unless a file is empty or the record of a run of the same name and seed.

    Args:
        field: subject of the error; "" for the file.

    Raises:
        FormatError: the file is another run's record, or no record.
    """
    line = _first_line(path)
    if line.endswith(b"\n"):
        given = _of_another(path, line[:-1], own)
    else:  # Nothing, or an incomplete header from a crash while writing.
        given = "" if line[: len(_BEGUN)] == _BEGUN[: len(line)] else _NO_RECORD
    if given:
        raise FormatError(
            field or str(path),
            got=f"{path}, {given}" if field else given,
            expected="an empty file or the record of this run",
            hint="Move the file away, or choose another path for the record.",
            code="record.other_run",
        )


def _first_line(path: Path) -> bytes:
    """Return a file's first line; b"" for a pipe or a device."""
    if not path.is_file():
        return b""
    with open_regular(path, "a run's record", limit=RECORD_BYTES) as file:
        return file.readline(LINE_BYTES)


def _of_another(path: Path, line: bytes, own: Header) -> str:
    """Return the reason why a file with this first line belongs to another run; "" if it does not."""
    try:
        found = parsed(str(path), line)
    except (FormatError, RecursionError):
        return _NO_RECORD
    if not isinstance(found, Header):
        return _NO_RECORD
    apart = [name for name in ("name", "seed") if getattr(found, name) != getattr(own, name)]
    return f"the record of a run with another {apart[0]}" if apart else ""


def _is_of_another_plan(path: Path, own: Header) -> bool:
    """Return True if a run's own record has other settings; measurements in the plan are ignored."""
    line = _first_line(path)
    if not line.endswith(b"\n"):  # Nothing would be lost.
        return False
    found = parsed(str(path), line[:-1])
    return isinstance(found, Header) and _settings(found.plan) != _settings(own.plan)


def _settings(plan: Mapping[str, Any] | None) -> Any:
    """Return the part of a plan that distinguishes runs."""
    if plan is None:
        return None
    plain = json.loads(json.dumps(to_jsonable(plan)))
    found = {name: plain.get(name) for name in _SETTINGS}
    chosen = {name: each["value"] for name, each in plain.items() if isinstance(each, dict) and "value" in each}
    return found | chosen if chosen else plain


def read_together(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the combined environment of several runs; differing values are joined as `a / b`.

    Missing versions of the source code become "unknown".
    """
    found = list(environments)
    told = [{SOURCES: "unknown"} | dict(each) for each in found]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: " / ".join(dict.fromkeys(each[name] for each in told if name in each)) for name in names}


def read_record(path: str | Path) -> RunRecord:
    """Read a run's record into memory; `read_summary` takes a fraction of the memory for a long run.

    Raises:
        FormatError: as of `read_lines`.
    """
    header, *rows = read_lines(path)
    assert isinstance(header, Header)  # `read_lines` raises otherwise.
    ends = [row for row in rows if isinstance(row, End)]
    return RunRecord(
        header,
        tuple(row for row in rows if isinstance(row, StepRecord)),
        tuple(row for row in rows if isinstance(row, Evaluation)),
        tuple(row for row in rows if isinstance(row, Event)),
        ends[-1] if ends else None,
    )


def read_lines(path: str | Path) -> Iterator[Line]:
    """Yield the header of a run's record, and then each complete line; an incomplete last line is dropped.

    Raises:
        FormatError: no regular file, no header, a second header, another schema, or a damaged line before the last.
    """
    with open_regular(path, "a run's record", limit=RECORD_BYTES) as file:
        number = 0
        while line := _next_line(path, file):
            number += 1
            # The run crashed while writing this line, possibly inside a multi-byte character.
            if not line.endswith(b"\n"):
                break
            row = parsed(f"{path}:{number}", line[:-1])
            if number == 1 and not isinstance(row, Header):
                raise FormatError(
                    str(path), got="no header", expected="a header as the first line", code="record.no_header"
                )
            if number > 1 and isinstance(row, Header):
                raise FormatError(
                    str(path), got="a second header", expected="one run per record", code="record.second_header"
                )
            yield row
        if number == 0 or (number == 1 and not line.endswith(b"\n") and line):
            given = "an incomplete first line" if line else "an empty file"
            raise FormatError(str(path), got=given, expected="a header as the first line", code="record.no_header")


def _next_line(path: str | Path, file: BinaryIO) -> bytes:
    try:
        line = file.readline(LINE_BYTES + 1)
    except OSError as error:
        raise unreadable_error(path, error, "a run's record") from None
    if len(line) > LINE_BYTES:
        raise too_large(path, len(line), "a line of a record", LINE_BYTES)
    return line


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
    """Read a run's record line by line; `FormatError` as of `read_record`."""
    lines = read_lines(path)
    header = next(lines)
    assert isinstance(header, Header)  # `read_lines` raises otherwise.
    found = RunSummary(header)
    for line in lines:
        found.add(line)
    return found
