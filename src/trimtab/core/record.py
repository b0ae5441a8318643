"""The record of a run: JSON lines, one header, then steps, evaluations and events, then an end.

A torn last line (a crash while writing) is dropped on reading; any other damage raises.
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

from trimtab.core.appended import Appended, not_written, sync
from trimtab.core.codec import to_jsonable
from trimtab.core.errors import FormatError, RecordExistsError
from trimtab.core.files import LINE_BYTES, RECORD_BYTES, open_regular, too_large, unreadable
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
    encoded,
    parsed,
)

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

SOURCES = "sources"  # of an environment: the state of this package's code
_BEGUN = b'{"kind": "header"'
_SETTINGS = ("batch_rows", "num_ranks", "batch_rule", "recompute_blocks")  # of a plan, beside what it chose


def _there(path: str | Path, error: FileExistsError) -> FormatError:
    way_out = (
        "A run with checkpoints goes on with the record that it began: RecordWriter(path, header, continues=True). "
        "Another run's has another path."
    )
    said = RecordExistsError("record", given=f"{path}, which exists", expected="a new file", way_out=way_out)
    said.errno = error.errno
    return said


class RecordWriter:
    """Appends lines to a file; each line is whole before the next begins, on a full disk too.

    Args:
        path: of a new file; or of any, where it `continues`: a run that is gone on with says how much of it stands, and
            one that begins writes it anew, where it is empty or was begun by that run. Was that by another plan, what
            there is stays beside it, as `NAME.1`.

    Raises:
        FormatError: a file is there, and it does not continue; a `FileExistsError` too. InUseError: another writer, of
            this process or another, has the file open. OSError: none can be made.
    """

    def __init__(self, path: str | Path, header: Header, *, continues: bool = False) -> None:
        try:
            self._file = Appended(Path(path), is_new=not continues, is_exclusive=True)
        except FileExistsError as error:
            raise _there(path, error) from None
        self._header, self._is_open_ended, self._is_named = header, continues, False
        if not continues:
            self.write(header)

    def end(self) -> int:
        """Return how many bytes were written, all of which are on disk then.

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
        """Drop what stands after so many bytes: it will be written once more.

        Raises:
            FormatError: there are fewer, or no line ends there, or it is the record of another run.
        """
        path = self._file.path
        require_own(path, self._header)
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            last = file.read(1)
        if size < end or last != b"\n":
            given = f"{size} bytes" if size < end else "a line that goes on there"
            way_out = "Give it the record that the run wrote, or go on without one."
            raise FormatError(
                str(path), given=given, expected=f"the {end} that stood at the checkpoint", way_out=way_out
            )
        self._file.cut(end)
        self._is_open_ended = False

    @property
    def is_open_ended(self) -> bool:
        """Whether the run has neither begun here nor been gone on with: what is in the file is as it was."""
        return self._is_open_ended

    def require_own(self) -> None:
        """Raise where a run that begins would write over what is not its own.

        Raises:
            FormatError: as of the function.
        """
        if self._is_open_ended:
            require_own(self._file.path, self._header)

    def _begin(self) -> None:
        """Write the header of a run that begins, over what it wrote before it was cut off."""
        if self._is_open_ended:
            self.require_own()
            if _is_of_another_plan(self._file.path, self._header):
                self._set_aside()
            self._file.cut(0)
            self._is_open_ended = False
            self.write(self._header)

    def _set_aside(self) -> None:
        """Leave what is there under another name: planned again, a run that was cut off may have another plan."""
        path = self._file.path
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        aside = next(each for each in names if not os.path.lexists(each))
        self._file.set_aside(aside)
        warnings.warn(f"{path} was of a run of another plan: it is {aside.name} now, and begun anew.", stacklevel=5)

    def write(self, line: Line) -> None:
        """Append one line; it is held in memory until the next `flush`, and longer where the disk is full.

        Raises:
            FormatError: it would be the first of a run in a file that is not its own.
        """
        self._begin()
        self._file.write(encoded(line))

    def flush(self) -> None:
        """Hand what was written to the operating system.

        Raises:
            SaveError: it did not take all of it. What it took before is whole, and the rest is tried again.
        """
        self._file.flush()

    def close(self) -> None:
        """Flush and close; may be called twice. Raises `SaveError`, as of `flush`: what was not written is lost."""
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def write_record(path: str | Path, record: RunRecord) -> None:
    """Write a whole run to a new file."""
    with RecordWriter(path, record.header) as writer:
        body: tuple[Line, ...] = (*record.steps, *record.evaluations, *record.events)
        for line in body if record.end is None else (*body, record.end):
            writer.write(line)


def require_own(path: Path, own: Header, field: str = "") -> None:
    """Raise where a file is neither empty nor the record of a run of the same name and seed.

    Args:
        field: what the error is about; "": the file.

    Raises:
        FormatError: it is another run's record, or none; it can be anything that somebody wants to keep.
    """
    line = _first_line(path)
    if line.endswith(b"\n"):
        given = _of_another(path, line[:-1], own)
    else:  # nothing, or half a header: the run was cut off as it wrote it
        given = "" if line[: len(_BEGUN)] == _BEGUN[: len(line)] else "what is no record"
    if given:
        given, expected = f"{path}, {given}" if field else given, "an empty file, or the record of this run"
        way_out = "Move it away, or give the run another file."
        raise FormatError(field or str(path), given=given, expected=expected, way_out=way_out)


def _first_line(path: Path) -> bytes:
    """Return a file's first line; nothing of a pipe or a device, which hold nothing."""
    if not path.is_file():
        return b""
    with open_regular(path, "a record", limit=RECORD_BYTES) as file:
        return file.readline(LINE_BYTES)


def _of_another(path: Path, line: bytes, own: Header) -> str:
    """Return in words why a file that begins with a line is not a run's own; "" where it is."""
    try:
        found = parsed(str(path), line)
    except (FormatError, RecursionError):
        return "what is no record"
    if not isinstance(found, Header):
        return "what is no record"
    apart = [name for name in ("name", "seed") if getattr(found, name) != getattr(own, name)]
    return f"the record of a run of another {apart[0]}" if apart else ""


def _is_of_another_plan(path: Path, own: Header) -> bool:
    """Return whether a run's own record is of other settings; what was measured on the way to them does not count."""
    line = _first_line(path)
    if not line.endswith(b"\n"):  # nothing that would be lost
        return False
    found = parsed(str(path), line[:-1])
    return isinstance(found, Header) and _settings(found.plan) != _settings(own.plan)


def _settings(plan: Mapping[str, Any] | None) -> Any:
    """Return what of a plan makes another run."""
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
    assert isinstance(header, Header)  # or `read_lines` raises
    return header


def read_together(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of runs that are read as one: of what differs between them each is told, `a / b`.

    Sources that were not recorded of some are "unknown" there.
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
    assert isinstance(header, Header)  # or `read_lines` raises
    ends = [row for row in rows if isinstance(row, End)]
    return RunRecord(
        header,
        tuple(row for row in rows if isinstance(row, StepRecord)),
        tuple(row for row in rows if isinstance(row, Evaluation)),
        tuple(row for row in rows if isinstance(row, Event)),
        ends[-1] if ends else None,
    )


def read_lines(path: str | Path) -> Iterator[Line]:
    """Yield the header of a run's record, and then each whole line after it; a torn last line is left out.

    Raises:
        FormatError: no regular file, no header, a second one, another schema, or a damaged line that is not the last.
    """
    with open_regular(path, "a record", limit=RECORD_BYTES) as file:
        number = 0
        while line := _next_line(path, file):
            number += 1
            if not line.endswith(b"\n"):  # the run was cut off as it wrote it; it may end inside a character
                break
            row = parsed(f"{path}:{number}", line[:-1])
            if number == 1 and not isinstance(row, Header):
                raise FormatError(str(path), given="no header", expected="a header line first")
            if number > 1 and isinstance(row, Header):
                raise FormatError(str(path), given="a second header", expected="one run a file")
            yield row
        if number == 0 or (number == 1 and not line.endswith(b"\n") and line):
            given = "a torn line" if line else "no header"
            raise FormatError(str(path), given=given, expected="a header line first")


def _next_line(path: str | Path, file: BinaryIO) -> bytes:
    try:
        line = file.readline(LINE_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error, "a record") from None
    if len(line) > LINE_BYTES:
        raise too_large(path, len(line), "lines of a record", LINE_BYTES)
    return line
