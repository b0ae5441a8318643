"""Log of the batch-size decisions of an adaptive run, written before every window.

The decisions depend on measured times. A resumed or repeated run reads the decisions from the log to form the same
batches.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.checkpoint.atomic_directory import open_file
from trimtab.core import validation
from trimtab.core.errors import FormatError, TrimtabError, ValueGivenError
from trimtab.core.files import AppendOnlyFile, not_written, written_beside
from trimtab.core.serialization import from_jsonable, to_jsonable
from trimtab.training.hooks import WindowDecision

NAME = "decisions.jsonl"
_LONGEST = 2**20  # maximum bytes of a line; the first line contains a plan


class _Read(NamedTuple):
    """Content of a log file.

    Attributes:
        by: Plan; "" for a missing file, None if the header is damaged.
        decided: Decisions by window.
        fault: Error of the first damaged line, or None.
    """

    by: str | None
    decided: dict[int, WindowDecision]
    fault: FormatError | None


class BatchSizeLog:
    """Log of batch-size decisions: a header line with the plan, then a line per window.

    An incomplete last line is ignored. Other damage raises an error, unless the run has another plan or the log has no
    decisions.

    Args:
        plan: Text form of the plan. Decisions made under a different plan are not reused.
        writes: True if this process writes the log. Only rank 0 does, because all ranks make the same decisions.

    Raises:
        FormatError: `path` is not a regular file or is unreadable.
    """

    def __init__(self, path: Path, plan: str, *, writes: bool) -> None:
        self._path, self._plan, self._writes = path, plan, writes
        self._read = _read(path)
        self._decided = self._read.decided  # only future windows stay in memory, as a run may have millions
        self._file: AppendOnlyFile | None = None
        self._newest = -1

    def follow(self, other: Path) -> None:
        """Use the decisions of another run; `ValueGivenError` if it has none of this plan, `FormatError` if damaged."""
        self._read = _read(other)
        self._decided = self._read.decided
        self._require_whole()
        if self._read.by != self._plan:
            has_other = bool(self._read.by)
            raise ValueGivenError(
                "checkpoints.follows",
                got=str(other.parent),
                problem=f"The batch-size decisions in {other.parent} were made under another plan."
                if has_other
                else f"There are no batch-size decisions in {other.parent}.",
                hint="Pass the checkpoint folder of a run with the same plan.",
                code="follows.other_plan" if has_other else "follows.no_decisions",
            )

    def prepare(self, windows: int) -> None:
        """Write a temporary copy of the log for a run that resumes after `windows` windows.

        If the log was written under another plan, its decisions for the windows after that are dropped. `begin`
        replaces the log with the copy.

        Raises:
            FormatError: A line is damaged.
            SaveError: The copy could not be written.
        """
        self._require_whole()
        if self._read.by != self._plan:
            self._decided = {index: each for index, each in self._decided.items() if index < windows}
        if self._writes:
            lines = [
                _summed({"plan": self._plan}),
                *(_summed({"window": index} | to_jsonable(each)) for index, each in self._decided.items()),
            ]
            try:
                self._file = written_beside(self._path, b"".join(lines))
            except OSError as error:
                raise not_written(self._path, error) from error
        self._newest = max(self._decided, default=-1)
        self._decided = {index: each for index, each in self._decided.items() if index >= windows}

    def _require_whole(self) -> None:
        """Raise the error of a damaged line, unless no decision of this plan can be missing."""
        by, decided, fault = self._read
        if fault is not None and (by == self._plan or (by is None and decided)):
            raise fault

    def begin(self) -> None:
        """Replace the log with the prepared copy."""
        if self._file is not None:
            self._file.rename(self._path)

    def before(self, index: int) -> WindowDecision | None:
        """Return the saved decision of a window, or None. Windows must be queried in order."""
        self._decided.pop(index - 1, None)
        return self._decided.get(index)

    def add(self, index: int, window: WindowDecision) -> None:
        """Append a window's decision unless it is in the log; after a `SaveError` it is written with the next one."""
        if index <= self._newest:
            return
        self._newest = index
        if self._file is not None:
            self._file.write(_summed({"window": index} | to_jsonable(window)))
            self._file.flush()

    def sync(self) -> None:
        """Sync the log to disk; raises `SaveError` on failure."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Close the log, and delete a prepared copy that `begin` has not installed."""
        file, self._file = self._file, None
        if file is not None:
            file.abandon() if file.path != self._path else file.close()


def _summed(data: Mapping[str, Any]) -> bytes:
    """Return a line with a CRC-32. Reading compares bytes, so any changed bit is detected."""
    found = zlib.crc32(json.dumps(data).encode())
    return json.dumps({**data, "crc32": f"{found:08x}"}).encode() + b"\n"


def _read(path: Path) -> _Read:
    """Return the content of a log file."""
    by: str | None = ""
    decided, last = dict[int, WindowDecision](), -1
    fault: FormatError | None = None
    for number, line in enumerate(_lines(path), 1):
        try:
            data = _data(line)
            if number == 1:
                by = str(data["plan"])
                continue
            index = validation.integer("window", data.pop("window"), low=last + 1)
            window = from_jsonable(WindowDecision, data)
            validation.integer("num_batches", window.num_batches)
            validation.integer("k", window.k)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            reason = str(error).rstrip(".") if isinstance(error, TrimtabError) else f"{type(error).__name__}: {error}"
            by = None if number == 1 else by
            fault = fault or FormatError(
                f"{path}:{number}",
                problem=f"Line {number} of the batch-size decisions in {path} is damaged ({reason}).",
                hint="Delete the file to resume without it: batch sizes are then decided from new timings.",
                code="decisions.damaged",
            )
            continue
        decided[index] = window
        last = index
    return _Read(by, decided, fault)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield complete lines, and the pieces of lines longer than `_LONGEST`."""
    if not os.path.lexists(path):
        return
    try:
        with open_file(path) as (descriptor, _), open(descriptor, "rb", closefd=False) as file:
            while line := file.readline(_LONGEST):
                if line.endswith(b"\n") or len(line) == _LONGEST:
                    yield line
    except OSError as error:
        raise FormatError(
            str(path),
            problem=f"The log of batch-size decisions, {path}, cannot be read ({error.strerror or error}).",
            hint="Make the file readable. If it is lost, delete it: batch sizes are then decided from new timings.",
            code="decisions.unreadable",
        ) from None


def _data(line: bytes) -> dict[str, Any]:
    data = json.loads(line)
    del data["crc32"]
    if _summed(data) != line:
        raise ValueError("its checksum does not match")
    return dict(data)
