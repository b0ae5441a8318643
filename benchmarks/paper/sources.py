"""Lookup and verified download of public data sets.

Search order:

    TRIMTAB_DATA         folder named by the user, with the layout below
    public source        downloaded into ~/.cache/trimtab (or XDG_CACHE_HOME) unless TRIMTAB_OFFLINE=1; cached files are
                         used in both cases
    ../shared/data       same layout, next to the working directory or to the checkout

Layout:

    cifar10/data_batch_1.gz ... data_batch_5.gz, test_batch.gz     (packing: `datasets.undo_differences`)
    wikitext-2/train.txt.xz, valid.txt.xz
    gpt2/encoder.json, vocab.bpe

A download is streamed into a temporary file and hashed. It is renamed into place, and opened, only if its sha256 is the
expected value.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trimtab.core.errors import DataMissingError, FormatError
from trimtab.core.files import open_regular, set_apart

TIMEOUT_S = 5.0
CHUNK_BYTES = 1 << 20
DATA_BYTES = 2**34  # size limit of a file
EMBEDDED = "digits_resnet and source_gpt"


@dataclass(frozen=True)
class PublicFile:
    """Downloadable file with its expected sha256 and size."""

    url: str
    sha256: str
    num_bytes: int

    @property
    def name(self) -> str:
        """File name in the cache."""
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class DataSet:
    """A public data set.

    Args:
        name: Display name.
        folder: Subfolder in the packed layout.
        files: File names in the packed layout.
        public: Downloadable files, all with the same parent URL.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    public: tuple[PublicFile, ...]

    @property
    def public_origin(self) -> str:
        """Host and path of the public source, for messages and records."""
        url = self.public[0].url if len(self.public) == 1 else self.public[0].url.rsplit("/", 1)[0]
        return url.split("://", 1)[-1]


@dataclass(frozen=True)
class Found:
    """Located files of a data set by name, with the origin to record. `is_public` is True for the public layout."""

    origin: str
    files: Mapping[str, Path]
    is_public: bool = False


def find(data_set: DataSet) -> Found:
    """Locate a data set, downloading it if necessary.

    Raises:
        DataMissingError: The data set was not found. The error lists every place tried.
        FormatError: A download has an unexpected sha256.
    """
    tried = []
    for look in (_in_named_folder, _in_public_source, _beside_checkout):
        found = look(data_set)
        if isinstance(found, Found):
            return found
        tried.append(found)
    raise DataMissingError(
        data_set.name,
        got="; ".join(tried),
        expected=f"{data_set.folder}/ with {', '.join(data_set.files)}",
        hint=f"Set TRIMTAB_DATA to a folder that holds it, or go online once to fetch it from "
        f"{data_set.public_origin}; the tasks {EMBEDDED} need no such data.",
    )


def at_hand(data_set: DataSet) -> str | None:
    """Return the location of a data set without network access and without reading it, None if not found.

    Raises:
        DataMissingError: TRIMTAB_DATA is not an existing folder.
    """
    named = _in_named_folder(data_set)
    if isinstance(named, Found):
        return named.origin
    cached = (cache_folder() / data_set.folder / file.name for file in data_set.public)
    if all(path.is_file() for path in cached):
        return str(cache_folder())
    beside = _beside_checkout(data_set)
    return beside.origin if isinstance(beside, Found) else None


def cache_folder() -> Path:
    """Return the folder for downloads and derived files, which may not exist yet."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "trimtab"
    try:
        return Path.home() / ".cache" / "trimtab"
    except RuntimeError:  # user without a home directory, as in some containers
        return Path(tempfile.gettempdir()) / "trimtab"


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open_regular(path, "a data set's file", limit=DATA_BYTES) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: yield a temporary file in the same folder and rename it after successful completion."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = set_apart(path)
    try:
        with temporary.open("xb") as stream:  # not tempfile: mode 0600 would block other users of a shared cache
            yield stream
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_named_folder(data_set: DataSet) -> Found | str:
    named = os.environ.get("TRIMTAB_DATA")
    if not named:
        return "TRIMTAB_DATA is not set"
    folder = Path(named).expanduser()
    if not folder.is_dir():  # the user named it, so raise instead of skipping
        raise DataMissingError("TRIMTAB_DATA", got=repr(named), expected="a folder that exists", hint="Unset it?")
    return _in_folder(folder, data_set, "TRIMTAB_DATA")


def _beside_checkout(data_set: DataSet) -> Found | str:
    found: Found | str = ""
    checkout = Path(__file__).resolve().parents[2]
    for root in (Path.cwd(), *([checkout] if (checkout / "pyproject.toml").is_file() else [])):
        found = _in_folder(root.parent / "shared" / "data", data_set, "../shared/data")
        if isinstance(found, Found):
            break
    return found


def _in_folder(folder: Path, data_set: DataSet, origin: str) -> Found | str:
    files = {name: folder / data_set.folder / name for name in data_set.files}
    missing = [name for name, path in files.items() if not path.is_file()]
    return f"{origin} has no {data_set.folder}/{missing[0]}" if missing else Found(origin, files)


def _in_public_source(data_set: DataSet) -> Found | str:
    try:
        files = {file.name: _cached(file, cache_folder() / data_set.folder) for file in data_set.public}
    except (OSError, http.client.HTTPException) as error:
        return f"the public source {data_set.public_origin} could not be used ({error})"
    return Found(f"public source {data_set.public_origin}", files, is_public=True)


def _cached(file: PublicFile, folder: Path) -> Path:
    path = folder / file.name
    if path.is_file() and sha256_file(path) == file.sha256:
        return path
    if os.environ.get("TRIMTAB_OFFLINE") == "1":
        raise FileNotFoundError(f"TRIMTAB_OFFLINE=1 and no good copy of {file.name} in the cache")
    with written_whole(path) as stream:
        _download(file, stream)
    return path


def _download(file: PublicFile, stream: BinaryIO) -> None:
    """Stream a download into `stream` and verify its size and sha256. Stops reading beyond the expected size."""
    digest, received = hashlib.sha256(), 0
    with urllib.request.urlopen(file.url, timeout=TIMEOUT_S) as response:
        while received <= file.num_bytes and (chunk := response.read(CHUNK_BYTES)):
            digest.update(chunk)
            stream.write(chunk)
            received += len(chunk)
    if received < file.num_bytes:
        raise ConnectionError(f"{file.name} ended after {received:,} of {file.num_bytes:,} bytes")
    if digest.hexdigest() != file.sha256:
        raise FormatError(
            file.url,
            got=f"a download with sha256 {digest.hexdigest()}",
            expected=file.sha256,
            hint="Nothing of it was kept. Set TRIMTAB_OFFLINE=1 and TRIMTAB_DATA to use a copy of your own.",
        )
