"""What windows of a freed batch were made by, written before each runs: what depends on times is the same once more."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.checkpoint.manifest import open_file
from trimtab.core import checks
from trimtab.core.appended import Appended, not_written, written_beside
from trimtab.core.codec import from_jsonable, to_jsonable
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.runtime.keeping import Decided

NAME = "decisions.jsonl"
_LONGEST = 2**20  # bytes of a line: the first has a plan in it


class _Fault(NamedTuple):
    """A line that is not as it was written. It is about a window before this one, as lines are in their order.

    The first line is about none, and tells by which plan all are.
    """

    error: FormatError
    before: float


class _Read(NamedTuple):
    """What a file says: by which plan windows were decided, and how; None: its first line is damaged."""

    by: str | None
    decided: dict[int, Decided]
    faults: list[_Fault]


class Journal:
    """A line a window, after one that says by which plan. A torn last line is dropped.

    Damage elsewhere is refused where it is about windows to come; what it took of those that are over is not missed.

    Args:
        plan: in words; what was decided by another one says nothing of this one's windows.
        writes: whether this process does. Of several ranks, which decide alike, the first.

    Raises:
        FormatError: what is there is no file, or cannot be read.
    """

    def __init__(self, path: Path, plan: str, *, writes: bool) -> None:
        self._path, self._plan, self._writes = path, plan, writes
        self._read = _read(path)
        self._decided = self._read.decided  # in memory what is to come alone: a run may have millions of windows
        self._file: Appended | None = None
        self._newest = -1

    def follow(self, other: Path) -> None:
        """Take what was decided in another run, and not what was in this one.

        Raises:
            ValueGivenError: nothing was, or by another plan. FormatError: it is damaged.
        """
        self._read = _read(other)
        self._decided = self._read.decided
        self._require_whole(0)
        if self._read.by != self._plan:
            given = f"{'decisions of another plan' if self._read.by else 'no decisions'} in {other.parent}"
            raise ValueGivenError("checkpoints.follows", given=given, expected="the folder of a run of this plan")

    def prepare(self, windows: int) -> None:
        """Get ready to begin after so many windows, beside what is there.

        What another plan decided of those to come is dropped.

        Raises:
            FormatError: what was decided of windows to come is damaged. SaveError: it cannot be written.
        """
        self._require_whole(windows)
        if self._read.by != self._plan:
            self._decided = {index: each for index, each in self._decided.items() if index < windows}
        if self._writes:
            lines = [_header(self._plan), *(_line(index, each) for index, each in self._decided.items())]
            try:
                self._file = written_beside(self._path, b"".join(lines))
            except OSError as error:
                raise not_written(self._path, error) from error
        self._newest = max(self._decided, default=-1)
        self._decided = {index: each for index, each in self._decided.items() if index >= windows}

    def _require_whole(self, windows: int) -> None:
        """Raise where a line is damaged that may be about a window to come of this plan."""
        by, decided, faults = self._read
        if by not in (None, self._plan):
            return
        for error, before in faults:
            if before > windows or (by is None and any(index >= windows for index in decided)):
                raise error

    def begin(self) -> None:
        """Take the place of what is there."""
        if self._file is not None:
            self._file.rename(self._path)

    def before(self, index: int) -> Decided | None:
        """Return what a window was made by; None where none was known of it, or of one after it was asked already."""
        self._decided.pop(index - 1, None)
        return self._decided.get(index)

    def add(self, index: int, window: Decided) -> None:
        """Write what a window is made by, once; it is with the operating system when this returns.

        Raises:
            SaveError: there is no room for it; it is written with the next.
        """
        if index <= self._newest:
            return
        self._newest = index
        if self._file is not None:
            self._file.write(_line(index, window))
            self._file.flush()

    def sync(self) -> None:
        """Bring it to disk; raises `SaveError` where that fails."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Write nothing more; what did not begin leaves no trace."""
        file, self._file = self._file, None
        if file is not None:
            file.abandon() if file.path != self._path else file.close()


def _line(index: int, window: Decided) -> bytes:
    return _summed({"window": index} | to_jsonable(window))


def _header(plan: str) -> bytes:
    return _summed({"plan": plan})


def _summed(data: Mapping[str, Any]) -> bytes:
    """Return the one text of a line: whatever bit of it changes, it is another."""
    found = zlib.crc32(json.dumps(data).encode())
    return json.dumps({**data, "crc32": f"{found:08x}"}).encode() + b"\n"


def _read(path: Path) -> _Read:
    """Return what a file says; nothing, by the plan "", where none is there."""
    read, waiting, last = _Read("", {}, []), list[FormatError](), -1
    for number, line in enumerate(_lines(path), 1):
        try:
            if number == 1:
                read = _Read(str(_data(line)["plan"]), {}, [])
                continue
            index, decided = _window(_data(line), last)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            damaged = _damaged(path, number, error)
            if number == 1:
                read = _Read(None, {}, [_Fault(damaged, 0)])
            else:
                waiting.append(damaged)
            continue
        read.decided[index] = decided
        read.faults.extend(_Fault(each, index) for each in waiting)
        waiting, last = [], index
    read.faults.extend(_Fault(each, math.inf) for each in waiting)
    return read


def _lines(path: Path) -> Iterator[bytes]:
    """Yield whole lines, and what is longer than any."""
    if not os.path.lexists(path):
        return
    try:
        with open(open_file(path)[0], "rb") as file:
            while line := file.readline(_LONGEST):
                if line.endswith(b"\n") or len(line) == _LONGEST:
                    yield line
    except OSError as error:
        given, expected = f"nothing that can be read ({error.strerror or error})", "a file of decisions"
        raise FormatError(str(path), given=given, expected=expected) from None


def _data(line: bytes) -> dict[str, Any]:
    data = json.loads(line)
    del data["crc32"]
    if _summed(data) != line:
        raise ValueError("other bytes than were written")
    return dict(data)


def _window(data: dict[str, Any], last: int) -> tuple[int, Decided]:
    """Return the window after the last that a line is about, and what it was made by."""
    index, decided = checks.integer("window", data.pop("window"), low=last + 1), from_jsonable(Decided, data)
    for name in ("num_batches", "k"):
        checks.integer(name, getattr(decided, name))
    return index, decided


def _damaged(path: Path, number: int, error: Exception) -> FormatError:
    return FormatError(
        f"{path}:{number}",
        given=f"a damaged line ({error})",
        expected="what a window was made by",
        way_out="Without this file the run goes on, and what windows are made by is decided anew, by times.",
    )
