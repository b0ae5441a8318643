"""A folder that is there whole or not at all, and knows when a bit of it changed.

    NAME.tmp-*/  ->  files, each synced  ->  manifest, synced  ->  rename to NAME  ->  parent synced  ->  hint `latest`

A folder counts where its manifest agrees with every byte of it; `latest` is for people. Nothing is ever written into a
folder that is there. The manifest holds size and CRC-32 of every file, and its own: that finds any one changed bit,
any burst of 32, and of all else what is not one in four billion. It is no signature: who can write there can write a
manifest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trimtab.core.codec import from_jsonable, write_whole
from trimtab.core.errors import DamagedError, FormatError

SCHEMA = 1
MANIFEST, LATEST = "manifest.json", "latest"
_TEMPORARY = ".tmp-"
_CHUNK = 2**22
_LONGEST_MANIFEST = 2**26
_WAY_OUT = "Resume from another one: `trimtab checkpoint verify FOLDER` says which are whole."


@dataclass(frozen=True)
class File:
    """A file's size, and the CRC-32 of its bytes in hexadecimal."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds: files by their paths in it, and what is said about them."""

    files: Mapping[str, File]
    about: Mapping[str, Any]
    schema: int = SCHEMA


def commit(parent: Path, name: str, fill: Callable[[Path], None], about: Callable[[], Mapping[str, Any]]) -> Path:
    """Write a folder, whole or not at all; returns it.

    Args:
        fill: writes the files into the folder it is given. about: JSON, asked for once they are there.

    Raises:
        FormatError: there is something of that name. OSError: it could not be written; what was there still is.
    """
    final = parent / name
    _require_absent(final)
    beside = parent / f"{name}{_TEMPORARY}{uuid.uuid4().hex}"
    beside.mkdir()
    try:
        fill(beside)
        seal(beside, about())
        _require_absent(final)
        os.rename(beside, final)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync(parent)
    with contextlib.suppress(OSError):  # a hint that nobody relies upon
        write_whole(parent / LATEST, name + "\n")
    return final


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """Bring a folder's files to disk, and write their manifest."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        files = {}
        for path in sorted(_files(folder)):
            synced = pool.submit(sync, folder / path)
            files[path] = _file(folder / path)  # a checksum takes a processor, a sync a disk
            synced.result()
    manifest = folder / MANIFEST
    manifest.write_bytes(_encoded({"schema": SCHEMA, "files": files, "about": about}))
    sync(manifest)
    for place in sorted({(folder / path).parent for path in files} | {folder}, reverse=True):
        sync(place)


def verify(folder: Path) -> Manifest:
    """Read every byte of a folder, and return its manifest.

    Raises:
        DamagedError: a file is missing, is one too many, has another size or other bytes, or is none; or the manifest.
    """
    manifest = manifest_of(folder)
    try:
        found = set(_files(folder)) - {MANIFEST}
        for path in sorted(manifest.files.keys() | found):
            if path not in found:
                raise _damaged(folder, path, "nothing")
            if path not in manifest.files:
                raise _damaged(folder, path, "a file that the manifest does not know")
            said = manifest.files[path]
            size = (folder / path).stat().st_size
            if size != said.bytes:
                raise _damaged(folder, path, f"{size} bytes", f"{said.bytes}")
            if _crc32(folder / path) != said.crc32:
                raise _damaged(folder, path, "other bytes than were written")
    except OSError as error:
        raise _damaged(folder, "", str(error)) from None
    return manifest


def manifest_of(folder: Path) -> Manifest:
    """Return a folder's manifest, which is as it was written; its files are not looked at.

    Raises:
        DamagedError: it is not, or there is none.
    """
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > _LONGEST_MANIFEST:
            raise _damaged(folder, MANIFEST, "no file that a manifest could be")
        text = path.read_bytes()
        data = json.loads(text)
        crc32 = data.pop("crc32")
        if _encoded(data) != text or crc32 != _checksum(data):
            raise _damaged(folder, MANIFEST, "other bytes than were written")
        manifest = from_jsonable(Manifest, data)
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise _damaged(folder, MANIFEST, f"what is no manifest ({error})") from None
    if manifest.schema != SCHEMA:
        raise _damaged(folder, MANIFEST, f"schema {manifest.schema}", f"{SCHEMA}")
    for name in manifest.files:
        if not _is_plain(name):
            raise _damaged(folder, MANIFEST, f"the path {name!r}", "one inside the folder")
    return manifest


def _is_plain(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and str(PurePosixPath(*parts)) == name and not {"..", "/"} & set(parts) and "\\" not in name


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of a folder's files.

    Raises:
        DamagedError: something in it is neither a file nor a folder.
    """
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{path}" for path in _files(Path(entry.path)))
        elif entry.is_file(follow_symlinks=False):
            yield entry.name
        else:
            raise _damaged(folder, entry.name, "a link, or another thing that is no file")


def _file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "crc32": _crc32(path)}


def _crc32(path: Path) -> str:
    found, buffer = 0, bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found = zlib.crc32(memoryview(buffer)[:count], found)
    return f"{found:08x}"


def _encoded(data: Mapping[str, Any]) -> bytes:
    """Return the one text of a manifest, its checksum in it: whatever bit changes, it is another."""
    return _text(dict(data) | {"crc32": _checksum(data)}) + b"\n"


def _checksum(data: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(_text(data)):08x}"


def _text(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, indent=1, allow_nan=False).encode()


def sync(path: Path) -> None:
    """Bring a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a committed folder: it is none from the first moment on, and never half of one."""
    aside = folder.with_name(f"{folder.name}{_TEMPORARY}{uuid.uuid4().hex}")
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def clean(parent: Path) -> None:
    """Delete what writers left that were ended; for who alone writes there."""
    for entry in os.scandir(parent):
        if _TEMPORARY in entry.name and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def _require_absent(final: Path) -> None:
    if os.path.lexists(final):
        raise FormatError(str(final), given="something of that name", expected="a new folder")


def _damaged(folder: Path, path: str, given: str, expected: str = "what the manifest says") -> DamagedError:
    return DamagedError(str(folder / path), given=given, expected=expected, way_out=_WAY_OUT)
