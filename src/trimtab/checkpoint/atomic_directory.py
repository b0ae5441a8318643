"""Checkpoint folders: written under a temporary name, synced, renamed, and verified by checksums.

    step-N.tmp-*/  ->  files, each synced  ->  manifest, synced  ->  rename to step-N  ->  parent synced  ->  `latest`

The manifest lists size and checksums of each file, and metadata of the run. A folder is valid if all files match. A
committed folder is never modified. The file `latest` is a hint for people; the code never reads it.

Files have a CRC-32 per 64 MiB chunk. A CRC-32 detects every single-bit error and every burst of up to 32 bits, and
misses one in four billion of all other errors. It is several times faster than SHA-256, which would find no more disk
errors. The manifest is small, and protected with SHA-256. Checksums stored next to the data are not a signature: anyone
with write access can write a manifest.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from trimtab.core import validation
from trimtab.core.errors import DamagedError, FormatError, SaveError, ValueGivenError
from trimtab.core.files import TEMPORARY, not_written, set_apart, sync, try_lock, write_over
from trimtab.core.serialization import from_jsonable, to_jsonable

try:  # same checksums, several times faster
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

T = TypeVar("T")

SCHEMA = 2
NAME = "manifest.json"
TENSORS, TREE = "tensors.safetensors", "state.json"  # files of a saved state, with a prefix per rank
LATEST = "latest"
DAMAGED = ".damaged-"
NAMED = re.compile(r"step-(\d{1,12})")  # the name of a checkpoint, from which the step is known if the manifest is lost
CHUNK_BYTES = 2**26  # part of the format: manifests list a checksum per chunk of this size
THREADS = 2  # for writing: enough for the disk's speed, while training needs the remaining cores
MOST_THREADS = 8  # for reading, when nothing else runs
_READ_BYTES = 2**20  # small enough to stay in the CPU cache between read and checksum
_MOST_PIECES = 1024  # maximum number of buffers for one preadv call (IOV_MAX)
_LONGEST = 2**26  # maximum bytes of a manifest
# The form written by `str`; `int` would also accept signs, spaces and digits of other scripts.
_RANKS = re.compile("[1-9][0-9]{0,8}")
# Codes of damages that several functions find.
CHANGED, MISSING, INVALID = "checkpoint.checksum_differs", "checkpoint.file_missing", "checkpoint.manifest_invalid"
# Error numbers that concern the file itself: missing, not a regular file (ENXIO for a socket), or on a broken disk.
# None comes from `open_file` and from short reads. All other errors may be temporary.
_OF_THE_FILE = frozenset({None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EIO})


def prefix_of(rank: int) -> str:
    """Return the prefix of a rank's file names; empty for rank 0."""
    return f"rank-{rank}-" if rank else ""


# Checksums of files.


class FileBuffer:
    """Memory for a file's contents, as consecutive pieces with the size of the file."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = [*itertools.accumulate(map(len, self._pieces))]

    def part(self, start: int, end: int) -> list[memoryview]:
        """Return the pieces for bytes `start` to `end`, limited to the number of buffers of a system call."""
        index, found = bisect.bisect_right(self._ends, start), list[memoryview]()
        while start < end and len(found) < _MOST_PIECES:
            begin = self._ends[index] - len(self._pieces[index])
            found.append(self._pieces[index][start - begin : end - begin])
            start = self._ends[index]
            index += 1
        return found


# Returns the memory for a file's bytes, or None to checksum without storing. Arguments: file name, descriptor, size.
Rooms = Callable[[str, int, int], FileBuffer | None]


def crc32_of_chunks(
    descriptor: int, size: int, pool: ThreadPoolExecutor, room: FileBuffer | None = None
) -> tuple[str, ...]:
    """Return the CRC-32 of each chunk of an open file, in hexadecimal.

    Args:
        room: Memory that receives the file's contents; None to discard the contents.

    Raises:
        OSError: Reading failed, or the file is shorter than `size`.
    """

    def of(start: int) -> str:
        return _crc32(descriptor, start, min(start + CHUNK_BYTES, size), room)

    starts = range(0, size, CHUNK_BYTES)
    return tuple(map(of, starts) if len(starts) < 2 else pool.map(of, starts))


def _crc32(descriptor: int, at: int, end: int, room: FileBuffer | None) -> str:
    found, discarded = 0, memoryview(bytearray(min(_READ_BYTES, end - at) if room is None else 0))
    while at < end:
        until = min(at + _READ_BYTES, end)
        pieces = [discarded[: until - at]] if room is None else room.part(at, until)
        count = os.preadv(descriptor, pieces, at)
        if count == 0:
            raise OSError(f"the file ends after {at} bytes")
        at += count
        for piece in pieces:
            found = crc32(piece[:count], found)
            count -= min(count, len(piece))
    return f"{found:08x}"


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading, and yield descriptor and size; `OSError` for links, pipes and others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


# The manifest of a folder.


class TemporaryReadError(FormatError):
    """Temporary read failure of a possibly undamaged file: stale handle, missing permission, too many open files."""


@dataclass(frozen=True)
class FileEntry:
    """Size of a file in bytes, and the CRC-32 of each chunk in hexadecimal."""

    bytes: int
    crc32: tuple[str, ...]

    def __post_init__(self) -> None:
        validation.not_negative(self, "bytes")


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder: its files by name, and metadata in `about`.

    The metadata of a run are those of `RunMetadata`. Every folder needs `step`; `world` and `finite` have defaults.
    """

    files: Mapping[str, FileEntry]
    about: Mapping[str, Any]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        validation.integer("about['step']", self.about.get("step"), low=0)
        for name in self.files:
            if name in ("", ".", "..", NAME) or {"/", "\\", "\0"} & set(name):
                raise FormatError(NAME, got=f"the file name {name!r}", expected="a plain name without a directory part")
        world = self.about.get("world", {})
        ranks = world.get("ranks", "1") if isinstance(world, Mapping) else None
        if not (isinstance(ranks, str) and _RANKS.fullmatch(ranks)):
            expected = "a positive integer as text, such as '2'"
            raise FormatError("about['world']['ranks']", got=f"{ranks!r:.40}", expected=expected)

    @property
    def step(self) -> int:
        """Number of completed windows. The folder with more windows is newer, independent of file times."""
        return int(self.about["step"])

    @property
    def is_finite(self) -> bool:
        """True unless the metadata marks a parameter as non-finite."""
        return self.about.get("finite") is not False

    @property
    def num_ranks(self) -> int:
        """Number of ranks that wrote the folder; 1 if the metadata has no entry."""
        return int(self.about.get("world", {}).get("ranks", "1"))


@dataclass(frozen=True)
class RunMetadata:
    """Metadata of a run at a checkpoint.

    Args:
        step: Number of completed windows.
        rows: Number of consumed samples.
        world: Environment facts by name, see `world_of`.
        in_shards: True if no rank held the complete state.
        accepted: Accepted environment changes since the run began, as text.
        noted: Environment changes that needed no acceptance, as text.
        finite: False if a saved parameter is non-finite.
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

    @property
    def num_ranks(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return int(self.world.get("ranks", "1"))


def run_metadata(folder: Path, manifest: Manifest) -> RunMetadata:
    """Return a folder's metadata; `DamagedError` if it is not that of a run."""
    try:
        return from_jsonable(RunMetadata, dict(manifest.about))
    except (FormatError, ValueGivenError) as error:
        problem = f"The metadata in {folder / NAME} do not describe a run ({str(error).rstrip('.')})."
        raise damaged_error(folder, NAME, problem, "checkpoint.metadata_invalid") from None


def manifest_of(folder: Path) -> Manifest:
    """Return a folder's manifest without checking the listed files.

    Raises:
        DamagedError: The manifest is missing, changed, or lists an invalid file name.
        FormatError: The manifest has a different schema version.
        TemporaryReadError: The manifest is temporarily unreadable.
    """
    path = folder / NAME
    try:
        with open_file(path) as (descriptor, size):
            text = b"" if size > _LONGEST else b"".join(iter(lambda: os.read(descriptor, _LONGEST), b""))
    except OSError as error:
        raise _read_error(folder, NAME, error) from None
    if size > _LONGEST:
        problem = f"{path} has {size} bytes, but a manifest has at most {_LONGEST}."
        raise damaged_error(folder, NAME, problem, INVALID)
    try:
        data = json.loads(text)
        said = {key: value for key, value in data.items() if key != "sha256"}
        is_whole = encoded(said) == text
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise damaged_error(folder, NAME, f"{path} is not a valid manifest ({error}).", INVALID) from None
    if not is_whole:
        problem = f"{path} has changed since it was written: its text does not match its own checksum."
        raise damaged_error(folder, NAME, problem, CHANGED)
    if (schema := said.get("schema")) != SCHEMA:
        raise _other_schema(path, schema)
    try:
        return from_jsonable(Manifest, said)
    except (FormatError, ValueGivenError) as error:
        problem = f"{path} matches its checksum, but has invalid contents ({str(error).rstrip('.')})."
        raise damaged_error(folder, NAME, problem, INVALID) from None


def _other_schema(path: Path, schema: object) -> FormatError:
    """Return the error for another schema version, written by an older or newer trimtab."""
    hint = "Start a new run in another folder."
    if type(schema) is int:
        age = "an older" if schema < SCHEMA else "a newer"
        hint = f"Resume with the version that wrote it, {age} one, or start a new run in another folder."
    return FormatError(
        f"{path}: schema",
        got=f"{schema!r}",
        expected=f"{SCHEMA}",
        problem=f"{path} has schema {schema!r:.40}, but this version of trimtab reads schema {SCHEMA}.",
        hint=hint,
        code="checkpoint.other_schema",
    )


def encoded(data: Mapping[str, Any]) -> bytes:
    """Return the canonical text of a manifest. Reading compares bytes, so any changed bit is detected."""

    def text(part: Mapping[str, Any]) -> bytes:
        return json.dumps(part, sort_keys=True, indent=1, allow_nan=False).encode()

    return text({**data, "sha256": hashlib.sha256(text(data)).hexdigest()}) + b"\n"


def damaged_error(folder: Path, name: str, problem: str, code: str) -> DamagedError:
    """Return a `DamagedError` for a file of a folder, or for the folder if `name` is empty."""
    hint = f"Run `trimtab checkpoint verify {folder.parent}` to list the undamaged checkpoints, and resume from one."
    return DamagedError(str(folder / name), problem=problem, hint=hint, code=code)


def _read_error(folder: Path, name: str, error: OSError) -> FormatError:
    """Return the error for a failed read: `DamagedError`, or `TemporaryReadError` if the failure may be temporary."""
    problem = f"{folder / name} cannot be read ({_reason(error)})."
    if error.errno in _OF_THE_FILE:
        return damaged_error(folder, name, problem, "checkpoint.unreadable")
    hint = f"Make the file readable and start again, or move {folder} away to resume from an older checkpoint."
    return TemporaryReadError(str(folder / name), problem=problem, hint=hint, code="checkpoint.out_of_reach")


def _reason(error: OSError) -> str:
    return str(error.strerror or error)


# Writing.


@contextlib.contextmanager
def writing(final: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder to fill with files, which becomes `final` at the end of the block.

    After any error, including an error of the block, existing files are unchanged. Call `commit_name` afterwards to
    sync the name. The temporary folder is locked while it is written.

    Args:
        about: JSON-serializable metadata for the manifest; must contain `step`.

    Raises:
        FormatError: `final` exists, or the block created something other than regular files.
        ValueGivenError: `about` has no step.
        SaveError: The folder could not be written.
    """
    Manifest({}, about)  # invalid metadata is refused before hours of writing
    _require_absent(final)
    beside, descriptor = set_apart(final), None
    try:
        beside.mkdir()
        descriptor = os.open(beside, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # without locks, `delete_temporary_files` never deletes the folder
            try_lock(descriptor)
        yield beside
        write_manifest(beside, about)
        _require_absent(final)
        os.rename(beside, final)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, SaveError):
            raise not_written(final, error) from error
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _require_absent(final: Path) -> None:
    if os.path.lexists(final):
        raise FormatError(
            str(final),
            problem=f"{final} exists already, and a checkpoint never replaces another one.",
            hint="Choose another name, or move the existing folder away.",
            code="checkpoint.exists",
        )


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Sync all files of a folder, then write and sync the manifest; `FormatError` for a subfolder, link or manifest."""
    files = {}
    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as disk:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.is_file(follow_symlinks=False) or entry.name == NAME:
                raise FormatError(
                    entry.path,
                    problem=f"{entry.path} is a folder, a link or a manifest, and cannot be part of a checkpoint.",
                    hint="Write regular files with other names.",
                    code="checkpoint.not_a_file",
                )
            with open_file(Path(entry.path)) as (descriptor, size):
                synced = disk.submit(os.fsync, descriptor)  # waits for the disk, while checksums need the processor
                files[entry.name] = FileEntry(size, crc32_of_chunks(descriptor, size, pool))
                synced.result()
    (folder / NAME).write_bytes(encoded(to_jsonable(Manifest(files, about))))
    sync(folder / NAME)
    sync(folder)


def commit_name(folder: Path) -> None:
    """Sync the parent directory, so that the name survives a power failure; `SaveError` if only that failed."""
    try:
        sync(folder.parent)
    except OSError as error:
        problem = f"The checkpoint {folder} is complete, but its name could not be synced to disk ({_reason(error)})."
        hint = f"Check the disk of {folder.parent}: a power failure could still remove this checkpoint."
        raise _not_done(folder, error, problem, hint, "checkpoint.not_synced") from error
    with contextlib.suppress(OSError):  # nothing depends on this hint
        write_over(folder.parent / LATEST, f"{folder.name}\n".encode(), is_synced=False)


def _not_done(folder: Path, error: OSError, problem: str, hint: str, code: str) -> SaveError:
    found = SaveError(str(folder), got=_reason(error), problem=problem, hint=hint, code=code)
    found.errno = error.errno
    return found


# Verification and search.


def verify(folder: Path, rooms: Rooms = lambda name, descriptor, size: None) -> Manifest:
    """Read all bytes of a folder, compare the checksums and return the manifest.

    Args:
        rooms: Returns the memory in which a file's bytes are stored during the check, or None. The contents are valid
            only after this function has returned.

    Raises:
        DamagedError: The manifest is damaged, or a file is missing, unexpected, unreadable, or has a different size or
            checksum.
        FormatError: The manifest has a different schema version.
        TemporaryReadError: A file is temporarily unreadable.
    """
    manifest = manifest_of(folder)
    try:
        there = {entry.name for entry in os.scandir(folder)} - {NAME}
    except OSError as error:
        raise _read_error(folder, "", error) from None
    # A generator, because a forged manifest may name a billion ranks.
    needed = (f"{prefix_of(rank)}{name}" for rank in range(1, manifest.num_ranks) for name in (TENSORS, TREE))
    if (lost := next((name for name in needed if name not in manifest.files), None)) is not None:
        problem = f"The manifest of {folder} lists no {lost}, although {manifest.num_ranks} ranks wrote the checkpoint."
        raise damaged_error(folder, lost, problem, MISSING)
    if extra := sorted(there - manifest.files.keys()):
        problem = f"{folder / extra[0]} is not listed in the checkpoint's manifest."
        raise damaged_error(folder, extra[0], problem, "checkpoint.file_unexpected")
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for name, said in manifest.files.items():
            if name not in there:
                raise damaged_error(folder, name, f"{folder / name} is missing.", MISSING)
            _verify_file(folder, name, said, pool, rooms)
    return manifest


def _verify_file(folder: Path, name: str, said: FileEntry, pool: ThreadPoolExecutor, rooms: Rooms) -> None:
    try:
        with open_file(folder / name) as (descriptor, size):
            is_read = size == said.bytes  # a file of another size is not read
            found = crc32_of_chunks(descriptor, size, pool, rooms(name, descriptor, size)) if is_read else ()
    except OSError as error:
        raise _read_error(folder, name, error) from None
    if not is_read:
        problem = f"{folder / name} has {size} bytes, but {said.bytes} bytes were written."
        raise damaged_error(folder, name, problem, "checkpoint.size_differs")
    if found != said.crc32:
        problem = f"{folder / name} has changed since it was written: its checksum differs from the manifest's."
        raise damaged_error(folder, name, problem, CHANGED)


class NewestDirectory(NamedTuple, Generic[T]):
    """The newest undamaged folder and its verified contents; both None if there is none.

    `refused` lists damaged folders sorted before it, with their errors: newer ones, and folders of unknown step.
    """

    folder: Path | None
    contents: T | None
    refused: list[tuple[Path, DamagedError]]


def newest_good(parent: Path, reads: Callable[[Path], T]) -> NewestDirectory[T]:
    """Return the newest folder that passes verification.

    Args:
        reads: Verifies a folder, such as `verify`, and returns its contents. A folder for which it raises
            `DamagedError` is refused.

    Raises:
        FormatError: A possibly newer folder has a different schema version, readable by another trimtab version.
        TemporaryReadError: A possibly newer folder is temporarily unreadable.
    """
    refused: list[tuple[Path, DamagedError]] = []
    for folder in committed_folders(parent):
        try:
            return NewestDirectory(folder, reads(folder), refused)
        except DamagedError as error:
            # A kept traceback would keep the contents and the callers' local variables alive.
            error.__traceback__ = error.__context__ = None
            refused.append((folder, error))
    return NewestDirectory(None, None, refused)


def committed_folders(parent: Path) -> list[Path]:
    """Return the checkpoint folders, newest first, without verifying the contents.

    A folder counts as a checkpoint if the name is `step-N`, if the manifest is valid, or if a damaged manifest lies
    next to a state file. Other programs also write files named `manifest.json`, so the file name alone is not enough.
    """
    return [*_manifests(parent)]


def _manifests(parent: Path) -> dict[Path, Manifest | None]:
    """Return the manifests of the checkpoint folders, newest first; None for an unreadable manifest."""
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found: list[tuple[float, bool, str, Manifest | None]] = []
    for name in names:
        if TEMPORARY in name or DAMAGED in name:
            continue
        folder, named, manifest = parent / name, NAMED.fullmatch(name), None
        try:
            manifest = manifest_of(folder)
            counts = True
        except (DamagedError, TemporaryReadError):
            counts = named is not None or ((folder / NAME).is_file() and (folder / TREE).is_file())
        except FormatError:  # readable by another trimtab version
            counts = True
        if counts:
            step = manifest.step if manifest is not None else int(named[1]) if named else math.inf
            found.append((step, named is not None, name, manifest))
    found.sort(key=lambda each: each[:3], reverse=True)  # of one step, `step-N` precedes its copies
    return {parent / name: manifest for _, _, name, manifest in found}


# Deletion.


def delete_old_folders(parent: Path, keep_last: int, written: str = "") -> list[Path]:
    """Delete old `step-N` folders and return the deleted paths.

    The newest `keep_last` folders stay. If none of them has finite parameters, the newest older folder with finite
    parameters stays too. Nothing is deleted unless the newest folder passes verification. Folders without a readable
    manifest do not count.

    Args:
        keep_last: Number of folders to keep, at least 1.
        written: Name of a folder committed just now, which needs no verification.

    Raises:
        FormatError: The newest folder is damaged; nothing was deleted.
        SaveError: An old folder could not be deleted.
    """
    validation.integer("keep_last", keep_last)
    own = {folder: manifest for folder, manifest in _manifests(parent).items() if _is_own(folder)}
    finite = {folder: manifest.is_finite for folder, manifest in own.items() if manifest is not None}
    kept, old = [*finite][:keep_last], [*finite][keep_last:]
    if old and kept[0].name != written:
        verify(kept[0])
    if not any(finite[folder] for folder in kept):
        last_finite = next((folder for folder in old if finite[folder]), None)
        old = [folder for folder in old if folder != last_finite]
    for folder in old:
        try:
            remove(folder)
        except OSError as error:
            problem = f"The old checkpoint {folder} could not be deleted ({_reason(error)})."
            hint = f"Make {parent} writable, or delete the folder yourself; newer checkpoints are intact."
            raise _not_done(folder, error, problem, hint, "checkpoint.not_deleted") from error
    return old


def _is_own(folder: Path) -> bool:
    """Return True for a `step-N` folder, which may be renamed or deleted. Links and other names belong to the user."""
    return NAMED.fullmatch(folder.name) is not None and not folder.is_symlink()


def remove(folder: Path) -> None:
    """Delete a committed folder atomically: it is renamed first, so that no partial checkpoint is ever visible."""
    aside = set_apart(folder)
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def put_aside(folder: Path) -> bool:
    """Rename a damaged `step-N` folder so that it no longer counts as a checkpoint.

    Returns:
        False if the folder belongs to the user and was left unchanged.
    """
    if not _is_own(folder):
        return False
    os.rename(folder, folder.with_name(f"{folder.name}{DAMAGED}{uuid.uuid4().hex[:8]}"))
    return True


def delete_temporary_files(parent: Path) -> list[Path]:
    """Delete temporary files of killed writers and return the paths. Files of live writers are locked and stay."""
    left = [Path(entry.path) for entry in os.scandir(parent) if _is_abandoned(entry)]
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return left


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    if TEMPORARY not in entry.name or entry.is_symlink():
        return False
    descriptor = None
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        return try_lock(descriptor)
    except OSError:  # without locks, a live writer cannot be ruled out
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
