"""Where public data comes from, in this order, and how a download earns trust.

    TRIMTAB_DATA         a folder of the user's, laid out as below
    public source        downloaded into ~/.cache/trimtab (XDG_CACHE_HOME), unless TRIMTAB_OFFLINE=1; a file already
                         there is used either way
    ../shared/data       the same layout, beside the working directory or beside the checkout

    cifar10/data_batch_1.gz ... data_batch_5.gz, test_batch.gz     (how it is packed: `datasets.undo_differences`)
    wikitext-2/train.txt.xz, valid.txt.xz
    gpt2/encoder.json, vocab.bpe

Nothing from the public source is opened before its sha256 is the expected one: it is streamed into a temporary file,
hashed on the way, and renamed into place only then.
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

from trimtab.core.appended import set_apart
from trimtab.core.errors import DataMissingError, FormatError
from trimtab.core.files import DATA_BYTES, open_regular

TIMEOUT_S = 5.0
CHUNK_BYTES = 1 << 20
EMBEDDED = "digits_resnet and source_gpt"


@dataclass(frozen=True)
class PublicFile:
    """A file on the web: where, and what it must be."""

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
        name: as people call it. folder, files: where it lies in such a folder.
        public: its files on the web, all in one web folder.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    public: tuple[PublicFile, ...]

    @property
    def public_origin(self) -> str:
        """What to call the public source: host and path."""
        url = self.public[0].url if len(self.public) == 1 else self.public[0].url.rsplit("/", 1)[0]
        return url.split("://", 1)[-1]


@dataclass(frozen=True)
class Found:
    """A data set's files by name, and what to record as their origin; `is_public` says which of the two layouts."""

    origin: str
    files: Mapping[str, Path]
    is_public: bool = False


def find(data_set: DataSet) -> Found:
    """Return where a data set is, downloading it if that comes first.

    Raises:
        DataMissingError: it is nowhere; names every place tried.
        FormatError: the public source sent something else than expected.
    """
    tried = []
    for look in (_in_named_folder, _in_public_source, _beside_checkout):
        found = look(data_set)
        if isinstance(found, Found):
            return found
        tried.append(found)
    raise DataMissingError(
        data_set.name,
        given="; ".join(tried),
        expected=f"{data_set.folder}/ with {', '.join(data_set.files)}",
        way_out=f"Set TRIMTAB_DATA to a folder that holds it, or go online once to fetch it from "
        f"{data_set.public_origin}; the tasks {EMBEDDED} need no such data.",
    )


def at_hand(data_set: DataSet) -> str | None:
    """Return where a data set is, without going online or reading it; None where it is nowhere.

    Raises:
        DataMissingError: TRIMTAB_DATA names no folder.
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
    """Return the folder for downloads and derived files; it may not exist yet."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "trimtab"
    try:
        return Path.home() / ".cache" / "trimtab"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "trimtab"


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with open_regular(path, "a data set's file", limit=DATA_BYTES) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file so that a reader sees all of it or nothing: beside its place, and renamed once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = set_apart(path)
    try:
        with temporary.open("xb") as stream:  # others may share a cache, and a file of tempfile's is its owner's alone
            yield stream
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_named_folder(data_set: DataSet) -> Found | str:
    named = os.environ.get("TRIMTAB_DATA")
    if not named:
        return "TRIMTAB_DATA is not set"
    folder = Path(named).expanduser()
    if not folder.is_dir():  # asked for by name: not passed over in silence
        raise DataMissingError("TRIMTAB_DATA", given=repr(named), expected="a folder that exists", way_out="Unset it?")
    return _in_folder(folder, data_set, "TRIMTAB_DATA")


def _beside_checkout(data_set: DataSet) -> Found | str:
    found: Found | str = ""
    checkout = Path(__file__).resolve().parents[3]
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
    """Stream a file from the web, stopping as soon as it is longer than it should be."""
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
            given=f"a download with sha256 {digest.hexdigest()}",
            expected=file.sha256,
            way_out="Nothing of it was kept. Set TRIMTAB_OFFLINE=1 and TRIMTAB_DATA to use a copy of your own.",
        )
