"""Manifest of a committed folder: size and checksums of each file, metadata, and a checksum of the manifest itself.

Files have a CRC-32 per 64 MiB chunk. A CRC-32 detects every single-bit error and every burst of up to 32 bits, and
misses one in four billion of all other errors. It is several times faster than SHA-256, which would find no more disk
errors.
A checksum stored next to the data is not a signature: anyone with write access can write a manifest. The manifest is
small, and protected with SHA-256.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.core import validation
from trimtab.core.errors import DamagedError, FormatError, ValueGivenError
from trimtab.core.serialization import from_jsonable, to_jsonable

try:  # same checksums, several times faster
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

TENSORS, TREE = "tensors.safetensors", "state.json"  # files of a saved state, with a prefix per rank
CHUNK_BYTES = 2**26  # part of the format: manifests list a checksum per chunk of this size
THREADS = 2  # for writing: enough for the disk's speed, while training needs the remaining cores
MOST_THREADS = 8  # for reading, when nothing else runs
_READ_BYTES = 2**20  # small enough to stay in the CPU cache between read and checksum
_MOST_PIECES = 1024  # maximum number of buffers for one preadv call (IOV_MAX)
SCHEMA = 2
NAME = "manifest.json"
STEP = "step"  # key in `about`: number of completed windows, required in every folder
FINITE = "finite"  # key in `about`: False if a saved parameter is non-finite; True by default
WORLD = "world"  # key in `about`: the environment of the run
# Codes of damages that several functions find.
CHANGED, MISSING = "checkpoint.checksum_differs", "checkpoint.file_missing"
# The form written by `str`; `int` would also accept signs, spaces and digits of other scripts.
_RANKS = re.compile("[1-9][0-9]{0,8}")
_LONGEST = 2**26
# Error numbers that concern the file itself: missing, not a regular file (ENXIO for a socket), or on a broken disk.
# None comes from `open_file` and from short reads. All other errors may be temporary.
_OF_THE_FILE = frozenset({None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EIO})


def prefix_of(rank: int) -> str:
    """Return the prefix of a rank's file names; empty for rank 0."""
    return f"rank-{rank}-" if rank else ""


class FileBuffer:
    """Memory for a file's contents, as consecutive pieces.

    Attributes:
        bytes: Total size.
    """

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = [*itertools.accumulate(map(len, self._pieces))]
        self.bytes = self._ends[-1] if self._ends else 0

    def part(self, start: int, end: int) -> list[memoryview]:
        """Return the pieces for bytes `start` to `end`, limited to the number of buffers of a system call."""
        index, found = bisect.bisect_right(self._ends, start), list[memoryview]()
        while start < end and len(found) < _MOST_PIECES:
            begin = self._ends[index] - len(self._pieces[index])
            found.append(self._pieces[index][start - begin : end - begin])
            start = self._ends[index]
            index += 1
        return found


def crc32_of_chunks(
    descriptor: int, size: int, pool: ThreadPoolExecutor, room: FileBuffer | None = None
) -> tuple[str, ...]:
    """Return the CRC-32 of each chunk of an open file, in hexadecimal.

    Args:
        room: Memory that receives the file's contents; None to discard the contents.

    Raises:
        OSError: Reading failed, or the file is shorter than `size`.
        ValueError: `room` has another size.
    """
    if room is not None and room.bytes != size:
        raise ValueError(f"the memory has {room.bytes} bytes, but the file has {size} bytes")

    def of(start: int) -> str:
        return _crc32(descriptor, start, min(start + CHUNK_BYTES, size), room)

    starts = range(0, size, CHUNK_BYTES)
    return tuple(map(of, starts) if len(starts) < 2 else pool.map(of, starts))


def _crc32(descriptor: int, at: int, end: int, room: FileBuffer | None) -> str:
    found, taking = 0, _again(min(_READ_BYTES, end - at)) if room is None else room.part
    while at < end:
        pieces = taking(at, min(at + _READ_BYTES, end))
        count = os.preadv(descriptor, pieces, at)
        if count == 0:
            raise OSError(f"the file ends after {at} bytes")
        at += count
        for piece in pieces:
            found = crc32(piece[:count], found)
            count -= min(count, len(piece))
    return f"{found:08x}"


def _again(size: int) -> Callable[[int, int], list[memoryview]]:
    """Return a function that reuses a buffer for every part, for callers without need for the contents."""
    buffer = memoryview(bytearray(size))
    return lambda start, end: [buffer[: end - start]]


class TemporaryReadError(FormatError):
    """Temporary read failure of a possibly undamaged file: stale handle, missing permission, too many open files."""


class ReadFailure(NamedTuple):
    """Reason for a failed read: errno and message. An exception's traceback would keep the callers' memory alive."""

    number: int | None
    words: str

    @classmethod
    def of(cls, error: OSError) -> ReadFailure:
        """Return the reason from an exception."""
        return cls(error.errno, str(error.strerror or error))


@dataclass(frozen=True)
class FileEntry:
    """Size of a file in bytes, and the CRC-32 of each chunk in hexadecimal."""

    bytes: int
    crc32: tuple[str, ...]

    def __post_init__(self) -> None:
        validation.not_negative(self, "bytes")


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder: its files by name, and metadata in `about`."""

    files: Mapping[str, FileEntry]
    about: Mapping[str, Any]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        validation.integer(f"about[{STEP!r}]", self.about.get(STEP), low=0)
        for name in self.files:
            if not is_plain(name) or name == NAME:
                raise FormatError(NAME, got=f"the file name {name!r}", expected="a plain name without a directory part")
        said = self._ranks()
        if not (isinstance(said, str) and _RANKS.fullmatch(said)):
            raise FormatError(
                f"about[{WORLD!r}]['ranks']", got=f"{said!r:.40}", expected="a positive integer as text, such as '2'"
            )

    @property
    def step(self) -> int:
        """Number of completed windows. The folder with more windows is newer, independent of file times."""
        return int(self.about[STEP])

    @property
    def is_finite(self) -> bool:
        """True unless the metadata marks a parameter as non-finite."""
        return self.about.get(FINITE) is not False

    @property
    def num_ranks(self) -> int:
        """Number of ranks that wrote the folder; 1 if the metadata has no entry."""
        return int(self._ranks())

    def _ranks(self) -> Any:
        world = self.about.get(WORLD, {})
        return world.get("ranks", "1") if isinstance(world, Mapping) else None

    def encoded(self) -> bytes:
        """Return the manifest's text with its checksum; `ValueGivenError` if `about` is not JSON-serializable."""
        try:
            return _encoded(to_jsonable(self))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueGivenError(
                "about",
                problem=f"The checkpoint's metadata cannot be written as JSON ({error}).",
                hint="Use strings, finite numbers, lists, and dictionaries with string keys.",
                code="checkpoint.metadata_not_json",
            ) from None


def manifest_of(folder: Path) -> Manifest:
    """Return a folder's manifest without checking the listed files.

    Raises:
        DamagedError: The manifest is missing, changed, or lists an invalid file name.
        FormatError: The manifest has a different schema version.
        TemporaryReadError: The manifest is temporarily unreadable.
    """
    text = _bytes_of(folder)
    try:
        data = json.loads(text)
        said = {key: value for key, value in data.items() if key != "sha256"}
        is_whole = _encoded(said) == text
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        problem = f"{folder / NAME} is not a valid manifest ({error})."
        raise damaged_error(folder, NAME, problem, "checkpoint.manifest_invalid") from None
    if not is_whole:
        problem = f"{folder / NAME} has changed since it was written: its text does not match its own checksum."
        raise damaged_error(folder, NAME, problem, CHANGED)
    if said.get("schema") != SCHEMA:
        raise _of_another(folder, said.get("schema"))
    try:
        return from_jsonable(Manifest, said)
    except (FormatError, ValueGivenError) as error:
        problem = f"{folder / NAME} matches its checksum, but has invalid contents ({str(error).rstrip('.')})."
        raise damaged_error(folder, NAME, problem, "checkpoint.manifest_invalid") from None


def is_plain(name: str) -> bool:
    """Return True for a file name without a directory part."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def open_file(path: Path) -> tuple[int, int]:
    """Return descriptor and size of a regular file, opened for reading; `OSError` for links, pipes and others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor, found.st_size


def damaged_error(folder: Path, name: str, problem: str, code: str) -> DamagedError:
    """Return a `DamagedError` for a file of a folder, or for the folder if `name` is empty."""
    hint = f"Run `trimtab checkpoint verify {folder.parent}` to list the undamaged checkpoints, and resume from one."
    return DamagedError(str(folder / name), problem=problem, hint=hint, code=code)


def read_error(folder: Path, name: str, why: ReadFailure) -> FormatError:
    """Return the error for a failed read: `DamagedError`, or `TemporaryReadError` if the failure may be temporary."""
    problem = f"{folder / name} cannot be read ({why.words})."
    if why.number in _OF_THE_FILE:
        return damaged_error(folder, name, problem, "checkpoint.unreadable")
    return TemporaryReadError(
        str(folder / name),
        problem=problem,
        hint=f"Make the file readable and start again, or move {folder} away to resume from an older checkpoint.",
        code="checkpoint.out_of_reach",
    )


def _of_another(folder: Path, schema: object) -> FormatError:
    """Return the error for another schema version, written by an older or newer trimtab."""
    hint = "Start a new run in another folder."
    if type(schema) is int:
        age = "an older" if schema < SCHEMA else "a newer"
        hint = f"Resume with the version that wrote it, {age} one, or start a new run in another folder."
    return FormatError(
        f"{folder / NAME}: schema",
        got=f"{schema!r}",
        expected=f"{SCHEMA}",
        problem=f"{folder / NAME} has schema {schema!r:.40}, but this version of trimtab reads schema {SCHEMA}.",
        hint=hint,
        code="checkpoint.other_schema",
    )


def _bytes_of(folder: Path) -> bytes:
    try:
        descriptor, size = open_file(folder / NAME)
        with os.fdopen(descriptor, "rb") as file:
            if size <= _LONGEST:
                return file.read(_LONGEST)
    except OSError as error:
        raise read_error(folder, NAME, ReadFailure.of(error)) from None
    problem = f"{folder / NAME} has {size} bytes, but a manifest has at most {_LONGEST}."
    raise damaged_error(folder, NAME, problem, "checkpoint.manifest_invalid")


def _encoded(data: Mapping[str, Any]) -> bytes:
    """Return the canonical text of a manifest. Reading compares bytes, so any changed bit is detected."""
    whole = dict(data) | {"sha256": hashlib.sha256(_text(data)).hexdigest()}
    return _text(whole) + b"\n"


def _text(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, indent=1, allow_nan=False).encode()


@dataclass(frozen=True)
class RunMetadata:
    """Metadata of a run at a checkpoint.

    Args:
        step: Number of completed windows.
        rows: Number of consumed samples.
        world: Environment facts by name, see `compatibility.world_of`.
        in_shards: True if no rank held the complete state.
        accepted: Accepted environment changes since the run began, as text.
        noted: Environment changes that needed no acceptance, as text.
    """

    step: int
    rows: int
    world: Mapping[str, str]
    plan: Mapping[str, Any]
    in_shards: bool
    accepted: Mapping[str, str]
    noted: Mapping[str, str] = field(default_factory=dict)
    finite: bool = True

    def __post_init__(self) -> None:
        validation.integer("rows", self.rows, low=0)
        if "ranks" not in self.world:
            raise ValueGivenError("world", got="no entry 'ranks'", expected="the number of ranks")


@dataclass(frozen=True)
class SavedCheckpoint:
    """Checkpoint to resume from: quoted folder path and metadata."""

    folder: str
    said: RunMetadata


def said_of(folder: Path, manifest: Manifest) -> RunMetadata:
    """Return a folder's metadata; `DamagedError` if it is not that of a run."""
    try:
        return from_jsonable(RunMetadata, dict(manifest.about))
    except (FormatError, ValueGivenError) as error:
        problem = f"The metadata in {folder / NAME} do not describe a run ({str(error).rstrip('.')})."
        raise damaged_error(folder, NAME, problem, "checkpoint.metadata_invalid") from None
