"""What windows of a freed batch were made by, written before each runs: what depends on times is the same once more."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trimtab.core.codec import from_jsonable, to_jsonable, write_whole
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.runtime.keeping import Decided

NAME = "decisions.jsonl"


class Journal:
    """A line a window, after one that says by which plan. A torn last line is dropped; any other damage raises.

    Args:
        plan: in words; what was decided by another one says nothing of this one's windows.
        writes: whether this process does. Of several ranks, which decide alike, the first.
    """

    def __init__(self, path: Path, plan: str, *, writes: bool) -> None:
        self._path, self._plan, self._writes = path, plan, writes
        self._by, self._decided = _read(path)  # in memory what is to come alone: a run may have millions of windows
        self._file: int | None = None
        self._newest = -1

    def go_on(self, windows: int) -> None:
        """Begin after so many windows; what another plan decided of those to come is dropped."""
        if self._by != self._plan:
            self._decided = {index: each for index, each in self._decided.items() if index < windows}
        if self._writes:
            lines = [_header(self._plan), *(_line(index, each) for index, each in self._decided.items())]
            write_whole(self._path, b"".join(lines).decode())
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._newest = max(self._decided, default=-1)
        self._decided = {index: each for index, each in self._decided.items() if index >= windows}

    def follow(self, other: Path) -> None:
        """Take what was decided in another run, and not what was in this one.

        Raises:
            ValueGivenError: nothing was, or by another plan. FormatError: it is damaged.
        """
        self._by, self._decided = _read(other)
        if self._by != self._plan:
            given = f"{'decisions of another plan' if self._by else 'no decisions'} in {other.parent}"
            raise ValueGivenError("checkpoints.follows", given=given, expected="the folder of a run of this plan")

    def before(self, index: int) -> Decided | None:
        """Return what a window was made by; None where none was known of it, or of one after it was asked already."""
        self._decided.pop(index - 1, None)
        return self._decided.get(index)

    def add(self, index: int, window: Decided) -> None:
        """Write what a window is made by, once; it is with the operating system when this returns."""
        if index <= self._newest:
            return
        self._newest = index
        if self._file is not None:
            os.write(self._file, _line(index, window))

    def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(index: int, window: Decided) -> bytes:
    return json.dumps({"window": index} | to_jsonable(window)).encode() + b"\n"


def _header(plan: str) -> bytes:
    return json.dumps({"plan": plan}).encode() + b"\n"


def _read(path: Path) -> tuple[str, dict[int, Decided]]:
    """Return by which plan windows were decided, and how; "" where nothing is there."""
    plan, found = "", dict[int, Decided]()
    if not path.exists():
        return plan, found
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            data = json.loads(line)
            if number == 1:
                plan = str(data["plan"])
                continue
            index = int(data.pop("window"))
            found[index] = from_jsonable(Decided, data)
            if _line(index, found[index]) != line + b"\n":
                raise ValueError("it is not as it is written")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            where = f"{path}:{number}"
            raise FormatError(where, given=f"a damaged line ({error})", expected="what a window was made by") from None
    return plan, found
