"""A folder that is there whole or not at all, and knows when a bit of it changed.

    NAME.tmp-*/  ->  files, each synced  ->  manifest, synced  ->  rename to NAME  ->  parent synced  ->  hint `latest`

A folder counts where its manifest agrees with every byte of it; `latest` is for people. Nothing is ever written into a
folder that is there.
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

from trimtab.checkpoint.checksums import MOST_THREADS, THREADS, Room, crc32_of_chunks
from trimtab.checkpoint.file_names import TENSORS, TREE, prefix_of
from trimtab.checkpoint.manifest import (
    NAME,
    File,
    Manifest,
    OutOfReach,
    Unread,
    damaged,
    is_plain,
    manifest_of,
    open_file,
    unread,
)
from trimtab.core import checks
from trimtab.core.appended import TEMPORARY, not_written, set_apart, sync, write_over
from trimtab.core.errors import DamagedError, FormatError, SaveError, ValueGivenError
from trimtab.core.locks import try_lock

LATEST = "latest"
DAMAGED = ".damaged-"
# Memory for the bytes of a file, where somebody wants them; it is told its name, its descriptor and how many they are.
Rooms = Callable[[str, int, int], Room | None]
NAMED = re.compile(r"step-(\d{1,12})")  # what a checkpoint is called, by which one is known that lost its manifest


def name_of(step: int) -> str:
    """Return what the checkpoint after so many steps is called."""
    return f"step-{step}"


def write(
    parent: Path,
    name: str,
    fill: Callable[[Path], None],
    about: Mapping[str, Any],
    last: Callable[[Callable[[], None]], object] = lambda commits: commits(),
) -> Path:
    """Write a folder, whole or not at all; returns it. Its name is on disk once it is settled.

    Args:
        fill: writes the files into the folder it is given. about: JSON; its `step` says how far it is.
        last: calls what it is given, which brings all that was filled in to disk, and may take long.

    Raises:
        FormatError: there is something of that name, or what was filled in is not files alone. ValueGivenError: the
            name is none, or `about` has no step or is not JSON. SaveError: it could not be written.
            What was there is as it was, whichever it is, or whatever else `fill` raises.
    """
    Manifest({}, about).encoded()  # refused before hours of writing
    if not is_plain(name) or TEMPORARY in name or DAMAGED in name:
        raise ValueGivenError("name", given=repr(name), expected="a name that a committed folder can have")
    final = parent / name
    _require_absent(final)
    try:
        with _temporary(final) as beside:
            fill(beside)

            def commit() -> None:
                seal(beside, about)
                _require_absent(final)
                os.rename(beside, final)

            last(commit)
    except SaveError:
        raise
    except OSError as error:
        raise not_written(final, error) from error
    return final


def settle(folder: Path) -> None:
    """Bring the name of a folder that was written to disk, and leave the hint.

    Raises:
        SaveError: the disk does not take it; the folder is there, and whole.
    """
    try:
        sync(folder.parent)
    except OSError as error:
        expected, way_out = "its name on disk", "It is there and whole; a power cut may yet take it."
        raise not_written(folder, error, expected, way_out) from error
    with contextlib.suppress(OSError):  # a hint that nobody relies upon
        write_over(folder.parent / LATEST, f"{folder.name}\n".encode(), is_synced=False)


@contextlib.contextmanager
def _temporary(final: Path) -> Iterator[Path]:
    """Make a folder beside, which a lock shows to be in use; what becomes of it, no trace of it is left there."""
    beside, descriptor = set_apart(final), None
    beside.mkdir()
    try:
        descriptor = os.open(beside, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: `clean` leaves it alone there
            try_lock(descriptor)
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def seal(folder: Path, about: Mapping[str, Any]) -> Manifest:
    """Bring a folder's files to disk, and write their manifest.

    Raises:
        FormatError: it holds a folder, a link or a manifest. OSError: it cannot be written.
    """
    files = {}
    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as disk:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.is_file(follow_symlinks=False) or entry.name == NAME:
                raise FormatError(entry.path, given="a folder, a link or a manifest", expected="files alone")
            files[entry.name] = _synced(Path(entry.path), pool, disk)
    manifest = Manifest(files, about)
    (folder / NAME).write_bytes(manifest.encoded())
    sync(folder / NAME)
    sync(folder)
    return manifest


def _synced(path: Path, pool: ThreadPoolExecutor, disk: ThreadPoolExecutor) -> File:
    """Return a file's size and checksums, once it is on disk: one takes a processor, the other waits."""
    descriptor, size = open_file(path)
    try:
        under_way = disk.submit(os.fsync, descriptor)
        found = File(size, crc32_of_chunks(descriptor, size, pool))
        under_way.result()
        return found
    finally:
        os.close(descriptor)


def verify(folder: Path, rooms: Rooms = lambda name, descriptor, size: None) -> Manifest:
    """Read every byte of a folder, and return its manifest.

    Args:
        rooms: takes the bytes of a file as they are read; what is in it counts once this returns.

    Raises:
        DamagedError: a file is missing, is one too many, has another size or other bytes, or is none; or the manifest.
        FormatError: the manifest has another schema. OutOfReach: a file cannot be read for now.
    """
    manifest = manifest_of(folder)
    try:
        there = {entry.name for entry in os.scandir(folder)} - {NAME}
    except OSError as error:
        raise unread(folder, "", Unread.of(error), "a folder") from None
    for name in _of_ranks(manifest):
        if name not in manifest.files:
            raise damaged(folder, name, "nothing", "a file of each rank")
    if extra := sorted(there - manifest.files.keys()):
        raise damaged(folder, extra[0], "a file that the manifest does not know")
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for name, said in manifest.files.items():
            if name not in there:
                raise damaged(folder, name, "nothing", "a file")
            _compare(folder, name, said, _found_of(folder / name, said.bytes, pool, rooms))
    return manifest


def _of_ranks(manifest: Manifest) -> Iterator[str]:
    """Yield the files that ranks beyond the first have to have written, by what the manifest says of them."""
    for rank in range(1, manifest.num_ranks):
        yield from (f"{prefix_of(rank)}{name}" for name in (TENSORS, TREE))


def _compare(folder: Path, name: str, said: File, found: File | Unread) -> None:
    if isinstance(found, Unread):
        raise unread(folder, name, found, "a file")
    if found.bytes != said.bytes:
        raise damaged(folder, name, f"{found.bytes} bytes", f"{said.bytes}")
    if found.crc32 != said.crc32:
        raise damaged(folder, name, "other bytes than were written")


def _found_of(path: Path, size: int, pool: ThreadPoolExecutor, rooms: Rooms) -> File | Unread:
    """Return what a file is, read where it has the size; or why it cannot be.

    No error leaves it: one that is kept would keep the memory that the bytes were to go to.
    """
    try:
        descriptor, found = open_file(path)
        try:
            if found != size:
                return File(found, ())
            return File(size, crc32_of_chunks(descriptor, size, pool, rooms(path.name, descriptor, size)))
        finally:
            os.close(descriptor)
    except OSError as error:
        return Unread.of(error)


class Refused(NamedTuple):
    """A folder that is not whole, and why."""

    folder: Path
    error: DamagedError

    def __str__(self) -> str:
        return str(self.error)


class Found(NamedTuple):
    """The newest folder that is whole, if any; `refused` are those that would have been newer, or cannot be told."""

    folder: Path | None
    manifest: Manifest | None
    refused: list[Refused]


def found(parent: Path) -> list[Path]:
    """Return the committed folders, the newest first by the steps in their manifests; no file is looked at."""
    return [folder for folder in committed(parent) if _step(folder) is not None]


def newest_good(
    parent: Path,
    reads: Callable[[Path, Manifest], object] = lambda folder, manifest: None,
    verifies: Callable[[Path], Manifest] = verify,
) -> Found:
    """Return the newest folder of which every byte is as it was written.

    Args:
        reads: takes a folder that is whole; one of which it raises `DamagedError` counts as one that is not.
        verifies: does what `verify` does; the folder that is returned is the last one.

    Raises:
        FormatError: one that may be newer has another schema: whoever wrote it can read it. OutOfReach: it cannot be
            read for now, and may be whole.
    """
    refused: list[Refused] = []
    for folder in committed(parent):
        try:
            manifest = verifies(folder)
            reads(folder, manifest)
            return Found(folder, manifest, refused)
        except DamagedError as error:
            error.__traceback__ = error.__context__ = None  # which hold all that called, as long as it is kept
            refused.append(Refused(folder, error))
    return Found(None, None, refused)


def committed(parent: Path) -> list[Path]:
    """Return what is a committed folder, or was one, the newest first; whether they are whole is not looked at.

    Other programs have manifests too: a folder of another name than `step-N` is one where its own can be believed, or
    lies beside a state.
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
    except (DamagedError, OutOfReach):
        return (path / NAME).is_file() and (path / TREE).is_file()
    except FormatError:  # of another schema: whoever wrote it can read it
        return True
    return True


def _step(folder: Path) -> int | None:
    """Return how far a folder says that it is; None where it cannot be believed."""
    try:
        return manifest_of(folder).step
    except FormatError:
        return None


def _is_finite(folder: Path) -> bool:
    """Return whether a folder's parameters are finite; False if its manifest cannot be read."""
    try:
        return manifest_of(folder).is_finite
    except FormatError:
        return False


def _place(folder: Path) -> tuple[float, bool, str]:
    """Return a folder's place in their order: by its name where its manifest is lost, else before all.

    Of those of one step the run's own comes first, and copies of it are not looked at.
    """
    step, named = _step(folder), NAMED.fullmatch(folder.name)
    at = step if step is not None else int(named[1]) if named else math.inf
    return at, named is not None, folder.name


def retain(parent: Path, keep_last: int, written: str = "") -> list[Path]:
    """Delete all but the newest `step-N`, once the newest is found whole; returns what was deleted.

    Of those with finite parameters the newest is kept too, however old.

    Args:
        written: the name of one that was committed just now, and needs no second reading.

    Raises:
        FormatError: the newest is not whole; nothing was deleted. SaveError: what is older cannot be deleted.
    """
    checks.integer("keep_last", keep_last)
    own = filter(_is_own, found(parent))
    newest, *others = [*own] or [None]
    old = others[keep_last - 1 :]
    if newest is None or not old:
        return []
    if newest.name != written:
        verify(newest)
    if not any(map(_is_finite, (newest, *others[: keep_last - 1]))):
        last_finite = next(filter(_is_finite, old), None)
        old = [folder for folder in old if folder != last_finite]
    for folder in old:
        try:
            remove(folder)
        except OSError as error:
            expected, way_out = "leave to delete it, as there are newer ones", "It stays, and all that is newer."
            raise not_written(folder, error, expected, way_out) from error
    return old


def _is_own(folder: Path) -> bool:
    """Return whether a folder is the run's, which may be renamed and deleted; others the user laid there."""
    return NAMED.fullmatch(folder.name) is not None and not folder.is_symlink()


def remove(folder: Path) -> None:
    """Delete a committed folder: it is none from the first moment on, and never half of one."""
    aside = set_apart(folder)
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def put_aside(folder: Path) -> bool:
    """Give a `step-N` that is not whole a name that no committed one has; returns False of what is the user's."""
    if not _is_own(folder):
        return False
    os.rename(folder, folder.with_name(f"{folder.name}{DAMAGED}{uuid.uuid4().hex[:8]}"))
    return True


def clean(parent: Path) -> list[Path]:
    """Delete what writers left that were ended, and return it; those that live hold a lock, however old theirs is."""
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
    except OSError:  # a file system without locks: whose it is cannot be told
        return False
    finally:
        os.close(descriptor)


def _require_absent(final: Path) -> None:
    if os.path.lexists(final):
        raise FormatError(str(final), given="something of that name", expected="a new folder")
