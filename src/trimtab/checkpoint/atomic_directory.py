"""Atomic, checksummed directories: written under a temporary name, synced, then renamed.

    NAME.tmp-*/  ->  files, each synced  ->  manifest, synced  ->  rename to NAME  ->  parent synced  ->  hint `latest`

A folder is valid if the manifest's checksums match all files. The file `latest` is a hint for people; the code never
reads it. A committed folder is never modified.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.checkpoint.manifest import (
    CHANGED,
    MISSING,
    MOST_THREADS,
    NAME,
    TENSORS,
    THREADS,
    TREE,
    FileBuffer,
    FileEntry,
    Manifest,
    ReadFailure,
    TemporaryReadError,
    crc32_of_chunks,
    damaged_error,
    is_plain,
    manifest_of,
    open_file,
    prefix_of,
    read_error,
)
from trimtab.core import validation
from trimtab.core.errors import DamagedError, FormatError, SaveError, ValueGivenError
from trimtab.core.files import TEMPORARY, not_written, set_apart, sync, try_lock, write_over

LATEST = "latest"
DAMAGED = ".damaged-"
# Returns the memory for a file's bytes, or None to checksum without storing. Arguments: file name, descriptor, size.
Rooms = Callable[[str, int, int], FileBuffer | None]
NAMED = re.compile(r"step-(\d{1,12})")  # the name of a checkpoint, from which the step is known if the manifest is lost


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint taken after `step` windows."""
    return f"step-{step}"


def write(
    parent: Path,
    name: str,
    fill: Callable[[Path], None],
    about: Mapping[str, Any],
    last: Callable[[Callable[[], None]], object] = lambda commits: commits(),
) -> Path:
    """Write a folder atomically and return its path. Call `commit_name` afterwards to sync the name.

    After any error, including an error from `fill`, existing files are unchanged.

    Args:
        fill: Writes the files into the temporary folder, whose path is the argument.
        about: JSON-serializable metadata for the manifest; must contain `step`.
        last: Called with the commit function, which syncs all files and renames the folder. The commit can take long,
            so several ranks use `last` to wait for the commit together.

    Raises:
        FormatError: `parent / name` exists, or `fill` created something other than regular files.
        ValueGivenError: `name` is invalid, or `about` has no step or is not JSON-serializable.
        SaveError: The folder could not be written.
    """
    Manifest({}, about).encoded()  # invalid metadata is refused before hours of writing
    if not is_plain(name) or TEMPORARY in name or DAMAGED in name:
        raise ValueGivenError(
            "name",
            got=repr(name),
            problem=f"{name!r} is not a valid name for a checkpoint folder.",
            hint=f"Pass a plain name without a directory part, {TEMPORARY!r} and {DAMAGED!r}.",
            code="checkpoint.invalid_name",
        )
    final = parent / name
    _require_absent(final)
    try:
        with _temporary(final) as beside:
            fill(beside)

            def commit() -> None:
                write_manifest(beside, about)
                _require_absent(final)
                os.rename(beside, final)

            last(commit)
    except SaveError:
        raise
    except OSError as error:
        raise not_written(final, error) from error
    return final


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


def _reason(error: OSError) -> str:
    return str(error.strerror or error)


@contextlib.contextmanager
def _temporary(final: Path) -> Iterator[Path]:
    """Create a locked temporary directory next to `final`; it is deleted if the block raises."""
    beside, descriptor = set_apart(final), None
    beside.mkdir()
    try:
        descriptor = os.open(beside, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # without locks, `delete_temporary_files` never deletes the folder
            try_lock(descriptor)
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def write_manifest(folder: Path, about: Mapping[str, Any]) -> Manifest:
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
            files[entry.name] = _synced(Path(entry.path), pool, disk)
    manifest = Manifest(files, about)
    (folder / NAME).write_bytes(manifest.encoded())
    sync(folder / NAME)
    sync(folder)
    return manifest


def _synced(path: Path, pool: ThreadPoolExecutor, disk: ThreadPoolExecutor) -> FileEntry:
    """Sync a file and return its size and checksums."""
    descriptor, size = open_file(path)
    try:
        under_way = disk.submit(os.fsync, descriptor)  # waits for the disk, while checksums need the processor
        found = FileEntry(size, crc32_of_chunks(descriptor, size, pool))
        under_way.result()
        return found
    finally:
        os.close(descriptor)


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
    # A generator, because a forged manifest may name a billion ranks.
    needed = (f"{prefix_of(rank)}{name}" for rank in range(1, manifest.num_ranks) for name in (TENSORS, TREE))
    try:
        there = {entry.name for entry in os.scandir(folder)} - {NAME}
    except OSError as error:
        raise read_error(folder, "", ReadFailure.of(error)) from None
    for name in needed:
        if name not in manifest.files:
            problem = (
                f"The manifest of {folder} lists no {name}, although {manifest.num_ranks} ranks wrote the checkpoint."
            )
            raise damaged_error(folder, name, problem, MISSING)
    if extra := sorted(there - manifest.files.keys()):
        problem = f"{folder / extra[0]} is not listed in the checkpoint's manifest."
        raise damaged_error(folder, extra[0], problem, "checkpoint.file_unexpected")
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for name, said in manifest.files.items():
            if name not in there:
                raise damaged_error(folder, name, f"{folder / name} is missing.", MISSING)
            _compare(folder, name, said, _found_of(folder / name, said.bytes, pool, rooms))
    return manifest


def _compare(folder: Path, name: str, said: FileEntry, found: FileEntry | ReadFailure) -> None:
    if isinstance(found, ReadFailure):
        raise read_error(folder, name, found)
    if found.bytes != said.bytes:
        problem = f"{folder / name} has {found.bytes} bytes, but {said.bytes} bytes were written."
        raise damaged_error(folder, name, problem, "checkpoint.size_differs")
    if found.crc32 != said.crc32:
        problem = f"{folder / name} has changed since it was written: its checksum differs from the manifest's."
        raise damaged_error(folder, name, problem, CHANGED)


def _found_of(path: Path, size: int, pool: ThreadPoolExecutor, rooms: Rooms) -> FileEntry | ReadFailure:
    """Return a file's size and checksums, or the reason for a failed read. A file of another size is not read."""
    # Errors are returned as values: an exception's traceback would keep the memory in `rooms` alive.
    try:
        descriptor, found = open_file(path)
        try:
            if found != size:
                return FileEntry(found, ())
            return FileEntry(size, crc32_of_chunks(descriptor, size, pool, rooms(path.name, descriptor, size)))
        finally:
            os.close(descriptor)
    except OSError as error:
        return ReadFailure.of(error)


class DamagedDirectory(NamedTuple):
    """A damaged folder and the error found by verification."""

    folder: Path
    error: DamagedError

    @property
    def problem(self) -> str:
        """Sentence about the damage, without a hint."""
        return self.error.problem or str(self.error)


class NewestDirectory(NamedTuple):
    """The newest undamaged folder, or None.

    `refused` lists damaged folders sorted before it: newer ones, and folders of unknown step.
    """

    folder: Path | None
    manifest: Manifest | None
    refused: list[DamagedDirectory]


def found(parent: Path) -> list[Path]:
    """Return committed folders with a readable manifest, newest step first. Other files are not read."""
    return [folder for folder in committed_folders(parent) if _step(folder) is not None]


def newest_good(
    parent: Path,
    reads: Callable[[Path, Manifest], object] = lambda folder, manifest: None,
    verifies: Callable[[Path], Manifest] = verify,
) -> NewestDirectory:
    """Return the newest folder that passes verification.

    Args:
        reads: Further check of a verified folder; a folder for which it raises `DamagedError` is refused.
        verifies: Replacement for `verify`. The returned folder is always the last one verified.

    Raises:
        FormatError: A possibly newer folder has a different schema version, readable by another trimtab version.
        TemporaryReadError: A possibly newer folder is temporarily unreadable.
    """
    refused: list[DamagedDirectory] = []
    for folder in committed_folders(parent):
        try:
            manifest = verifies(folder)
            reads(folder, manifest)
            return NewestDirectory(folder, manifest, refused)
        except DamagedError as error:
            # A kept traceback would keep the callers' local variables alive.
            error.__traceback__ = error.__context__ = None
            refused.append(DamagedDirectory(folder, error))
    return NewestDirectory(None, None, refused)


def committed_folders(parent: Path) -> list[Path]:
    """Return the checkpoint folders, newest first, without verifying the contents.

    A folder counts as a checkpoint if the name is `step-N`, if the manifest is valid, or if a damaged manifest lies
    next to a state file. Other programs also write files named `manifest.json`, so the file name alone is not enough.
    """
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [parent / name for name in names if TEMPORARY not in name and DAMAGED not in name]
    return sorted(filter(_counts, paths), key=_place, reverse=True)


def _counts(path: Path) -> bool:
    if NAMED.fullmatch(path.name):
        return True
    try:
        manifest_of(path)
    except (DamagedError, TemporaryReadError):
        return (path / NAME).is_file() and (path / TREE).is_file()
    except FormatError:  # readable by another trimtab version
        return True
    return True


def _step(folder: Path) -> int | None:
    """Return the step from a folder's manifest, or None if the manifest is unreadable."""
    try:
        return manifest_of(folder).step
    except FormatError:
        return None


def _is_finite(folder: Path) -> bool:
    """Return True if the manifest is readable and marks all parameters as finite."""
    try:
        return manifest_of(folder).is_finite
    except FormatError:
        return False


def _place(folder: Path) -> tuple[float, bool, str]:
    """Return the sort key of a folder: step, then `step-N` names before copies, then name."""
    step, named = _step(folder), NAMED.fullmatch(folder.name)
    at = step if step is not None else int(named[1]) if named else math.inf
    return at, named is not None, folder.name


def delete_old_folders(parent: Path, keep_last: int, written: str = "") -> list[Path]:
    """Delete old `step-N` folders and return the deleted paths.

    The newest `keep_last` folders stay. If none of them has finite parameters, the newest older folder with finite
    parameters stays too. Nothing is deleted unless the newest folder passes verification.

    Args:
        keep_last: Number of folders to keep, at least 1.
        written: Name of a folder committed just now, which needs no verification.

    Raises:
        FormatError: The newest folder is damaged; nothing was deleted.
        SaveError: An old folder could not be deleted.
    """
    validation.integer("keep_last", keep_last)
    own = [*filter(_is_own, found(parent))]
    old = own[keep_last:]
    if not old:
        return []
    newest = own[0]
    if newest.name != written:
        verify(newest)
    if not any(map(_is_finite, own[:keep_last])):
        last_finite = next(filter(_is_finite, old), None)
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
    left = [Path(entry.path) for entry in os.scandir(parent) if _is_left(entry)]
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return left


def _is_left(entry: os.DirEntry[str]) -> bool:
    if TEMPORARY not in entry.name or entry.is_symlink():
        return False
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return try_lock(descriptor)
    except OSError:  # without locks, a live writer cannot be ruled out
        return False
    finally:
        os.close(descriptor)


def _require_absent(final: Path) -> None:
    if os.path.lexists(final):
        raise FormatError(
            str(final),
            problem=f"{final} exists already, and a checkpoint never replaces another one.",
            hint="Choose another name, or move the existing folder away.",
            code="checkpoint.exists",
        )
