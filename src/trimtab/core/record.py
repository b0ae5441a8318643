"""The record of a run as JSON lines: a header, then steps, evaluations and events, then an end.

An incomplete last line (from a crash while writing) is dropped on reading; any other damage raises.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from trimtab.core.append_only_file import AppendOnlyFile, not_written, sync
from trimtab.core.bounded_read import LINE_BYTES, RECORD_BYTES, open_regular, too_large, unreadable_error
from trimtab.core.errors import FormatError, RecordExistsError
from trimtab.core.record_lines import (
    BRIEF,
    RECORD_SCHEMA,
    End,
    Evaluation,
    Event,
    Header,
    Line,
    RunRecord,
    StepRecord,
    encode_line,
    parsed,
)
from trimtab.core.serialization import to_jsonable

__all__ = [
    "BRIEF",
    "RECORD_SCHEMA",
    "SOURCES",
    "End",
    "Evaluation",
    "Event",
    "Header",
    "Line",
    "RecordWriter",
    "RunRecord",
    "StepRecord",
    "read_header",
    "read_lines",
    "read_record",
    "read_together",
    "require_own",
    "write_record",
]

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
        self._header, self._is_open_ended, self._is_named = header, continues, False
        if not continues:
            self.write(header)

    def end(self) -> int:
        """Write all lines to disk and return the file's size in bytes.

        Raises:
            SaveError: as of `flush`.
        """
        self._begin()
        size = self._file.sync()
        if not self._is_named:
            self._sync_name()
        return size

    def _sync_name(self) -> None:
        try:
            sync(self._file.path.parent)
        except OSError as error:
            raise not_written(self._file.path, error) from error
        self._is_named = True

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
        self._is_open_ended = False

    @property
    def is_open_ended(self) -> bool:
        """True while the run has neither started nor resumed here: the file is still unchanged."""
        return self._is_open_ended

    def require_own(self) -> None:
        """Raise if a run that starts would overwrite a foreign file.

        Raises:
            FormatError: as of the function `require_own`.
        """
        if self._is_open_ended:
            require_own(self._file.path, self._header)

    def _begin(self) -> None:
        """Write the header of a run that starts, over its own earlier record."""
        if self._is_open_ended:
            self.require_own()
            if _is_of_another_plan(self._file.path, self._header):
                self._set_aside()
            self._file.cut(0)
            self._is_open_ended = False
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
        """Append one line; it stays in memory until the next `flush`, and longer if the disk is full.

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


def read_header(path: str | Path) -> Header:
    """Read the first line of a run's record.

    Raises:
        FormatError: no such file, no header, or another schema.
    """
    header = next(read_lines(path))
    assert isinstance(header, Header)  # `read_lines` raises otherwise.
    return header


def read_together(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the combined environment of several runs; differing values are joined as `a / b`.

    Missing versions of the source code become "unknown".
    """
    found = list(environments)
    told = [{SOURCES: "unknown"} | dict(each) for each in found]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: " / ".join(dict.fromkeys(each[name] for each in told if name in each)) for name in names}


def read_record(path: str | Path) -> RunRecord:
    """Read a run's record into memory; `read_summary` takes a fraction of it for a long run.

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
