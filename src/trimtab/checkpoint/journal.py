"""What windows of a freed batch were made by, written before each runs: what depends on times is the same once more."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trimtab.core.codec import from_jsonable, to_jsonable
from trimtab.core.errors import FormatError
from trimtab.runtime.keeping import Decided

NAME = "decisions.jsonl"


class Journal:
    """A line a window. A torn last line is dropped; any other damage raises.

    Args:
        follows: decisions of another run are taken, and none are written.
    """

    def __init__(self, path: Path, *, follows: bool = False) -> None:
        self._decided = _read(path)
        self._file: int | None = None
        if not follows:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            os.ftruncate(self._file, sum(len(_line(i, each)) for i, each in self._decided.items()))
            os.lseek(self._file, 0, os.SEEK_END)

    def before(self, index: int) -> Decided | None:
        """Return what a window was made by; None where none was known of it."""
        return self._decided.get(index)

    def add(self, index: int, window: Decided) -> None:
        """Write what a window is made by, once; it is with the operating system when this returns."""
        if index in self._decided:
            return
        self._decided[index] = window
        if self._file is not None:
            os.write(self._file, _line(index, window))

    def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(index: int, window: Decided) -> bytes:
    return json.dumps({"window": index} | to_jsonable(window)).encode() + b"\n"


def _read(path: Path) -> dict[int, Decided]:
    if not path.exists():
        return {}
    found: dict[int, Decided] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            data = json.loads(line)
            index = int(data.pop("window"))
            found[index] = from_jsonable(Decided, data)
            if _line(index, found[index]) != line + b"\n":
                raise ValueError("it is not as it is written")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            where = f"{path}:{number}"
            raise FormatError(where, given=f"a damaged line ({error})", expected="what a window was made by") from None
    return found
