"""Append-only files that contain whole lines only, even if the disk is full."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import uuid
import warnings
import weakref
from io import FileIO
from pathlib import Path

from trimtab.core.errors import SaveError
from trimtab.core.file_locks import holder_pid, in_use, is_at, lock_if_possible

TEMPORARY = ".tmp-"  # Part of the names of files that are not complete yet, or are about to be deleted.


class AppendOnlyFile:
    """A file for appending: each flush writes all buffered data or none, and a failed flush is retried with the next.

    Data that was written but not flushed is held in memory; a forked process does not flush its parent's data.

    Args:
        path: created if it does not exist.
        is_new: True to fail if the file exists.
        is_exclusive: True to lock the file until it is closed, so that no second writer of any process appends to it.

    Raises:
        OSError: the file cannot be opened.
        InUseError: the file is already locked.
    """

    def __init__(self, path: Path, *, is_new: bool = False, is_exclusive: bool = False) -> None:
        self.path, self._process = path, os.getpid()
        self._waiting: list[bytes] = []
        self._torn_at: int | None = None
        self._is_exclusive = is_exclusive
        self._file = self._opened(is_new)
        while is_exclusive and not self._locked():
            self._file.close()
            self._file = self._opened(False)

    def _opened(self, is_new: bool) -> FileIO:
        return open(
            self.path,
            "xb" if is_new else "ab",
            buffering=0,
            opener=lambda name, flags: os.open(name, flags | os.O_APPEND, 0o666),
        )

    def _locked(self) -> bool:
        """Lock the open file. Returns False if the path leads to another file by now."""
        descriptor = self._file.fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # A pipe or a device may have several writers.
            return True
        if not lock_if_possible(descriptor):
            pid = holder_pid(descriptor)
            self._file.close()
            raise in_use(self.path, pid)
        _release_in_children()
        _EXCLUSIVE.add(self)
        return is_at(descriptor, self.path)

    def release_in_child(self) -> None:
        """Detach a forked process from the file: the inherited descriptor would keep the lock after the parent ends."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.dup2(null, self._file.fileno(), inheritable=False)
            finally:
                os.close(null)

    def write(self, data: bytes) -> None:
        """Buffer data for the next flush; raises `ValueError` if the file is closed."""
        if self._file.closed:
            raise ValueError(f"{self.path}: the file is closed; nothing can be written")
        self._waiting.append(data)

    def flush(self) -> None:
        """Write buffered data to the operating system.

        Raises:
            SaveError: not everything was written. The file is unchanged, and the data stay buffered.
        """
        if not self._waiting or os.getpid() != self._process:
            return
        try:
            self._mend()
            self._add(b"".join(self._waiting))
        except OSError as error:
            raise not_written(self.path, error) from error
        self._waiting.clear()

    def _add(self, data: bytes) -> None:
        start, rest = os.fstat(self._file.fileno()).st_size, memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
        except BaseException:
            self._torn_at = start
            with contextlib.suppress(OSError):
                self._mend()
            raise

    def _mend(self) -> None:
        """Remove a partly written flush, if any."""
        if self._torn_at is not None:
            os.ftruncate(self._file.fileno(), self._torn_at)
            self._torn_at = None

    def sync(self) -> int:
        """Flush, wait for the disk and return the file's size in bytes; raises `SaveError` as `flush` does."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise not_written(self.path, error) from error

    def cut(self, size: int) -> None:
        """Truncate the file to a size in bytes and discard buffered data."""
        self._waiting.clear()
        self._torn_at = size
        self._mend()

    def set_aside(self, path: Path) -> None:
        """Rename the file and continue in a new, empty one under the old name.

        Raises:
            SaveError: the new file could not be made; the old one keeps its name.
        """
        try:
            new = written_beside(self.path, b"", is_synced=False)
            try:
                if self._is_exclusive:
                    lock_if_possible(new._file.fileno())
                _exchange(self.path, path, new)
            except BaseException:
                new.abandon()
                raise
        except OSError as error:
            raise not_written(self.path, error) from error
        self._file, new._file = new._file, self._file
        new.close()

    def rename(self, path: Path) -> None:
        """Rename the file, replacing any file of the new name."""
        os.replace(self.path, path)
        self.path = path

    def close(self) -> None:
        """Flush and close; may be called twice. The file is closed even if the flush fails."""
        try:
            if not self._file.closed:
                self.flush()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close the file without a flush, and delete it."""
        self._waiting.clear()
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # The attribute is missing if opening failed.
            try:
                self.close()
            except SaveError as error:  # An exception raised in __del__ would be printed and ignored.
                warnings.warn(
                    f"{self.path} was not closed, and its last lines could not be written: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


_EXCLUSIVE: weakref.WeakSet[AppendOnlyFile] = weakref.WeakSet()


@functools.cache  # Registered once, on first use rather than at import.
def _release_in_children() -> None:
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for file in _EXCLUSIVE:
        file.release_in_child()


def _exchange(path: Path, aside: Path, new: AppendOnlyFile) -> None:
    """Rename a file and put a new one in its place; if the second rename fails, the first is undone."""
    os.rename(path, aside)
    try:
        new.rename(path)
    except BaseException:
        os.rename(aside, path)
        raise


def set_apart(path: Path) -> Path:
    """Return a unique temporary name in the same folder as a path."""
    return path.with_name(f"{path.name}{TEMPORARY}{uuid.uuid4().hex}")


def written_beside(path: Path, data: bytes, *, is_synced: bool = True) -> AppendOnlyFile:
    """Write data to a new temporary file in a path's folder and return the file; rename it to the path afterwards.

    Args:
        is_synced: True to wait for the disk.

    Raises:
        SaveError: the file could not be written and was removed.
        OSError: no file can be created in the folder.
    """
    file = AppendOnlyFile(set_apart(path), is_new=True)
    try:
        file.write(data)
        file.sync() if is_synced else file.flush()
    except BaseException:
        file.abandon()
        raise
    return file


def write_over(path: Path, data: bytes, *, is_synced: bool = True) -> None:
    """Replace a file's content atomically. A symbolic link at the path is replaced, not followed.

    Raises:
        OSError: as of `written_beside`; the old content is unchanged.
    """
    file = written_beside(path, data, is_synced=is_synced)
    try:
        file.rename(path)
    except BaseException:
        file.abandon()
        raise
    file.close()


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk; raises `OSError` if that fails."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync folders, and answer EINVAL.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def not_written(
    path: Path,
    error: OSError,
    expected: str = "free disk space and write permission",
    hint: str = "The existing content is unchanged.",
) -> SaveError:
    """Return the error for a file or folder that the file system could not write or remove."""
    made = SaveError(str(path), got=f"the error {str(error.strerror or error)!r}", expected=expected, hint=hint)
    made.errno = error.errno
    return made
