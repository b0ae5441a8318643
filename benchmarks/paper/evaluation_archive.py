"""Archives of evaluations: `benchmarks/results/evaluation-<machine>.tar.xz`, unpacked below `runs/evaluations`.

The archive is committed; the unpacked folder is ignored by git. An archive is unpacked again when its content differs
from the one that was unpacked or packed last, for example after `git pull`. Equal files yield equal bytes on every
machine with the same liblzma.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import lzma
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import FormatError
from trimtab.core.files import write_over
from trimtab.core.serialization import read_json, to_json, write_whole

RESULTS = Path("benchmarks") / "results"
UNPACKED = Path("runs") / "evaluations"
PREFIX, SUFFIX = "evaluation-", ".tar.xz"
# Pages that are generated from the records. They are last in an archive, so that a changed sentence leaves the bytes of
# all records before them equal, and git stores only the end of the archive again.
PAGES = ("evaluation.md", "evaluation.html", "evaluation.json", "report.md", "summary.json")
_PARTIAL = ".partial"  # part of the names of files that are being written


@dataclass(frozen=True)
class Unpacked:
    """Record of the archive that a folder was unpacked from or packed into last.

    Args:
        sha256: Hash of the archive.
        files: Files of the archive, relative to the folder.
    """

    sha256: str
    files: tuple[str, ...]
    schema: int = 1


def folder_of(root: Path, name: str) -> Path:
    """Return the folder into which the archive of an evaluation is unpacked."""
    return root / UNPACKED / name


def archive_of(root: Path, name: str) -> Path:
    """Return the archive of an evaluation."""
    return root / RESULTS / f"{name}{SUFFIX}"


def summary_of(archive: Path) -> Path:
    """Return the file of the compact record beside an archive."""
    return archive.with_name(archive.name.removesuffix(SUFFIX) + ".json")


def unpack_all(root: Path) -> list[Path]:
    """Unpack every archive that differs from its folder's record, and return the folders sorted by name.

    Raises:
        FormatError: An archive is damaged, or has a member outside its folder.
    """
    names = sorted(path.name.removesuffix(SUFFIX) for path in (root / RESULTS).glob(f"{PREFIX}*{SUFFIX}"))
    return [unpacked(root, name) for name in names]


def unpacked(root: Path, name: str) -> Path:
    """Return the folder of an evaluation, unpacked if its archive has changed."""
    folder, archive = folder_of(root, name), archive_of(root, name)
    if archive.is_file():
        unpack(archive, folder)
    return folder


def unpack(archive: Path, folder: Path) -> bool:
    """Unpack an archive into a folder, unless the folder was unpacked from or packed into it.

    Files that were never archived, such as those of an interrupted slice, are kept. Files of the previous archive that
    are missing in the new one are deleted.

    Args:
        archive: Archive whose members are all below the name of the folder.
        folder: Folder to create or update.

    Returns:
        False if nothing had to be done.

    Raises:
        FormatError: The archive is damaged, or has a member outside the folder. The folder is unchanged.
    """
    with _locked(folder):
        data = archive.read_bytes()
        sha256, before = hashlib.sha256(data).hexdigest(), _record(folder)
        if before is not None and before.sha256 == sha256 and folder.is_dir():
            return False
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            _extract(archive, data, Path(temporary), folder.name)
            made = Path(temporary) / folder.name
            files = _files(made)
            for gone in set(() if before is None else before.files) - set(files):
                (folder / gone).unlink(missing_ok=True)
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(made / name, folder / name)
        _write_record(folder, Unpacked(sha256, files))
        return True


def pack(folder: Path, archive: Path) -> bool:
    """Write the archive of a folder atomically, unless its content is equal already.

    Args:
        folder: Folder of results.
        archive: Archive to write.

    Returns:
        False if the archive was up to date.
    """
    with _locked(folder):
        tar = _tar(folder)
        changed = _content(archive) != tar
        if changed:
            write_over(archive, lzma.compress(tar, preset=9 | lzma.PRESET_EXTREME))
        _write_record(folder, Unpacked(hashlib.sha256(archive.read_bytes()).hexdigest(), _files(folder)))
        return changed


def is_packed(folder: Path, archive: Path) -> bool:
    """Return True if the archive has the files of the folder. Compares content, because bytes depend on liblzma."""
    return _content(archive) == _tar(folder)


def _extract(archive: Path, data: bytes, into: Path, name: str) -> None:
    """Extract the members of an archive below `into / name`.

    Raises:
        FormatError: The archive is damaged, or a member is neither a file nor a folder below `name`.
    """
    expected = f"files below {name}/, packed by benchmarks/paper/evaluation_archive.py"
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as tar:
            for member in tar:
                top, *rest = member.name.split("/")
                if top != name or ".." in rest or not (member.isfile() or member.isdir()):
                    raise FormatError(str(archive), got=f"the member {member.name!r}", expected=expected)
                tar.extract(member, into, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise FormatError(str(archive), got=f"a damaged archive ({error})", expected=expected) from None
    if not (into / name).is_dir():
        raise FormatError(str(archive), got="an archive without files", expected=expected)


def _tar(folder: Path) -> bytes:
    """Return a tar archive of a folder without owners and times. Records are first, generated pages are last."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(_files(folder), key=lambda name: (name in PAGES, name)):
            data = (folder / name).read_bytes()
            member = tarfile.TarInfo(f"{folder.name}/{name}")
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _content(archive: Path) -> bytes:
    """Return the decompressed archive; empty if missing or damaged."""
    try:
        return lzma.decompress(archive.read_bytes())
    except (FileNotFoundError, lzma.LZMAError):
        return b""


def _files(folder: Path) -> tuple[str, ...]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return tuple(sorted(path.relative_to(folder).as_posix() for path in paths if _PARTIAL not in path.name))


def _record_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _record(folder: Path) -> Unpacked | None:
    """Return the record of a folder; None if missing or damaged, so that the archive is unpacked again."""
    try:
        return read_json(Unpacked, _record_path(folder))
    except (FileNotFoundError, FormatError):
        return None


def _write_record(folder: Path, found: Unpacked) -> None:
    write_whole(_record_path(folder), to_json(found))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the parent of a folder, because tests and figures run in several processes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
