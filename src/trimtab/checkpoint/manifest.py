"""What a committed folder says of itself: size and checksums of every file, what it is about, and its own checksum.

CRC-32 of every 64 MiB finds any one changed bit, any burst of 32, and of all else what is not one in four billion; it
runs several times faster than SHA-256, which would find no more of what disks do. No checksum beside the data is a
signature: who can write there can write a manifest. The manifest itself, upon which the rest hangs, is small: SHA-256.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.core import checks
from trimtab.core.codec import from_jsonable, to_jsonable
from trimtab.core.errors import DamagedError, FormatError, ValueGivenError

SCHEMA = 2
NAME = "manifest.json"
STEP = "step"  # the one thing every folder has to say: how far it is
FINITE = "finite"  # whether every saved parameter is; true if it is not given
WORLD = "world"  # what a run's folder says of ranks, by name
_RANKS = re.compile("[1-9][0-9]{0,8}")  # as `str` writes a number: `int` would read more, and digits of other scripts
_LONGEST = 2**26
_WAY_OUT = "Resume from another one: `trimtab checkpoint verify FOLDER` says which are whole."
_OUT_OF_REACH = "It may be whole, and stays as it is: start again once it can be read, or move it away."
# What a system says of the file itself: it is away, no file (of a socket ENXIO; of others, or of one that ends early,
# open_file and the sums say so without a number), or its disk is broken. All else may be over in a moment.
_OF_THE_FILE = frozenset({None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EIO})


class OutOfReach(FormatError):
    """What cannot be read for now, and may be whole: a stale handle, no leave, too many open files."""


class Unread(NamedTuple):
    """Why a file cannot be read: the system's number, and its words. An error would keep all that called."""

    number: int | None
    words: str

    @classmethod
    def of(cls, error: OSError) -> Unread:
        """Return what an error says."""
        return cls(error.errno, str(error.strerror or error))


@dataclass(frozen=True)
class File:
    """A file's size, and the CRC-32 of each of its chunks in hexadecimal."""

    bytes: int
    crc32: tuple[str, ...]

    def __post_init__(self) -> None:
        checks.not_negative(self, "bytes")


@dataclass(frozen=True)
class Manifest:
    """What a folder holds: files by their names, and what is said about them."""

    files: Mapping[str, File]
    about: Mapping[str, Any]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        checks.integer(f"about[{STEP!r}]", self.about.get(STEP), low=0)
        for name in self.files:
            if not is_plain(name) or name == NAME:
                raise FormatError(NAME, given=f"the file {name!r}", expected="the name of a file in the folder")
        said = self._ranks()
        if not (isinstance(said, str) and _RANKS.fullmatch(said)):
            given, expected = f"{said!r:.40} as ranks", "a number above 0, in digits"
            raise FormatError(f"about[{WORLD!r}]", given=given, expected=expected)

    @property
    def step(self) -> int:
        """How far the folder is: of two, the one with more is newer, whatever clocks say."""
        return int(self.about[STEP])

    @property
    def is_finite(self) -> bool:
        """Whether every parameter in the folder is finite, as far as the folder says."""
        return self.about.get(FINITE) is not False

    @property
    def num_ranks(self) -> int:
        """Ranks that wrote into the folder; 1 where it does not say."""
        return int(self._ranks())

    def _ranks(self) -> Any:
        world = self.about.get(WORLD, {})
        return world.get("ranks", "1") if isinstance(world, Mapping) else None

    def encoded(self) -> bytes:
        """Return its text, checksum included.

        Raises:
            ValueGivenError: what it says is not JSON.
        """
        try:
            return _encoded(to_jsonable(self))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueGivenError("about", given=f"{error}", expected="what JSON can hold") from None


def manifest_of(folder: Path) -> Manifest:
    """Return a folder's manifest; its files are not looked at.

    Raises:
        DamagedError: there is none, it is not as it was written, or it names what is no file of the folder.
        FormatError: it has another schema. OutOfReach: it cannot be read for now.
    """
    text = _bytes_of(folder)
    try:
        data = json.loads(text)
        said = {key: value for key, value in data.items() if key != "sha256"}
        is_whole = _encoded(said) == text
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise damaged(folder, NAME, f"what is no manifest ({error})") from None
    if not is_whole:
        raise damaged(folder, NAME, "other bytes than were written")
    if said.get("schema") != SCHEMA:
        raise _of_another(folder, said.get("schema"))
    try:
        return from_jsonable(Manifest, said)
    except (FormatError, ValueGivenError) as error:
        raise damaged(folder, NAME, f"what no writer of it writes ({error})") from None


def is_plain(name: str) -> bool:
    """Return whether a name is one of a file in a folder, and of none elsewhere."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def open_file(path: Path) -> tuple[int, int]:
    """Open a file for reading; returns its descriptor, and its size.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or anything else that is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError("it is no file")
    return descriptor, found.st_size


def damaged(folder: Path, name: str, given: str, expected: str = "what the manifest says") -> DamagedError:
    """Return the error that names a file of a folder, or the folder."""
    return DamagedError(str(folder / name), given=given, expected=expected, way_out=_WAY_OUT)


def unread(folder: Path, name: str, why: Unread, expected: str) -> FormatError:
    """Return the error for what cannot be read: it is damaged, or out of reach."""
    given = f"nothing that can be read ({why.words})"
    if why.number in _OF_THE_FILE:
        return damaged(folder, name, given, expected)
    return OutOfReach(str(folder / name), given=given, expected=expected, way_out=_OUT_OF_REACH)


def _of_another(folder: Path, schema: object) -> FormatError:
    """Return the error for a folder of another trimtab, which can read what this one cannot."""
    by, way_out = "", ""
    if type(schema) is int:
        by = f", of {'an older' if schema < SCHEMA else 'a newer'} trimtab"
        way_out = "Go on with the trimtab that wrote it, or begin in a new folder."
    return FormatError(f"{folder / NAME}: schema", given=f"{schema!r}{by}", expected=str(SCHEMA), way_out=way_out)


def _bytes_of(folder: Path) -> bytes:
    try:
        descriptor, size = open_file(folder / NAME)
        with os.fdopen(descriptor, "rb") as file:
            if size <= _LONGEST:
                return file.read(_LONGEST)
    except OSError as error:
        raise unread(folder, NAME, Unread.of(error), "a manifest") from None
    raise damaged(folder, NAME, f"{size} bytes", f"a manifest of at most {_LONGEST}")


def _encoded(data: Mapping[str, Any]) -> bytes:
    """Return the one text of a manifest: whatever bit of it changes, it is another."""
    whole = dict(data) | {"sha256": hashlib.sha256(_text(data)).hexdigest()}
    return _text(whole) + b"\n"


def _text(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, indent=1, allow_nan=False).encode()
