"""A file that lines are added to, and that a full disk leaves with whole ones."""

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
from trimtab.core.locks import holder_pid, in_use, is_at, lock_if_possible

TEMPORARY = ".tmp-"  # in the names of what is not there yet, or no more


class Appended:
    """A file that is added to: of what is flushed all gets there, or nothing does and it is tried again with the next.

    What was written and not flushed is held in memory; in a forked process it is the parent's to flush.

    Args:
        path: made where it is not there. is_new: it must not be. is_exclusive: whether the file is locked until it is
            closed, so that no second one of this or another process adds to it.

    Raises:
        OSError: it cannot be opened. InUseError: it is locked already.
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
        """Lock the open file; returns False if the path has another one by now."""
        descriptor = self._file.fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or a device, which several may write
            return True
        if not lock_if_possible(descriptor):
            pid = holder_pid(descriptor)
            self._file.close()
            raise in_use(self.path, pid)
        _release_in_children()
        _EXCLUSIVE.add(self)
        return is_at(descriptor, self.path)

    def release_in_child(self) -> None:
        """Let go of the file in a forked process, whose copy of it would keep the lock beyond its parent's end."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.dup2(null, self._file.fileno(), inheritable=False)
            finally:
                os.close(null)

    def write(self, data: bytes) -> None:
        """Hold what the next flush brings to the file; raises `ValueError` where it was closed."""
        if self._file.closed:
            raise ValueError(f"{self.path}: write to a closed file")
        self._waiting.append(data)

    def flush(self) -> None:
        """Hand what waits to the operating system.

        Raises:
            SaveError: it did not take all of it. The file is as it was, and what waited still does.
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
        """Take off half a line, where there is one."""
        if self._torn_at is not None:
            os.ftruncate(self._file.fileno(), self._torn_at)
            self._torn_at = None

    def sync(self) -> int:
        """Bring all of it to disk; returns its bytes. Raises `SaveError`, as of `flush`."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise not_written(self.path, error) from error

    def cut(self, size: int) -> None:
        """Drop what stands after so many bytes, and what waits."""
        self._waiting.clear()
        self._torn_at = size
        self._mend()

    def set_aside(self, path: Path) -> None:
        """Leave what is there under another name, and go on in a new file.

        Raises:
            SaveError: there is no room for one; what is there stays, under its name.
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
        """Give the file another name, whatever had it."""
        os.replace(self.path, path)
        self.path = path

    def close(self) -> None:
        """Flush and close; may be called twice. Closed it is, whatever a flush says."""
        try:
            if not self._file.closed:
                self.flush()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close it without what waits, and delete it."""
        self._waiting.clear()
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # it was opened
            try:
                self.close()
            except SaveError as error:  # raised here it would be printed and lost
                warnings.warn(f"Lines of a file that was never closed are lost: {error}", RuntimeWarning, stacklevel=2)


_EXCLUSIVE: weakref.WeakSet[Appended] = weakref.WeakSet()


@functools.cache  # once, and not at import
def _release_in_children() -> None:
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for file in _EXCLUSIVE:
        file.release_in_child()


def _exchange(path: Path, aside: Path, new: Appended) -> None:
    """Give a file another name, and its own to a new one; where that fails it has its own again."""
    os.rename(path, aside)
    try:
        new.rename(path)
    except BaseException:
        os.rename(aside, path)
        raise


def set_apart(path: Path) -> Path:
    """Return a name beside a path's that nobody else has."""
    return path.with_name(f"{path.name}{TEMPORARY}{uuid.uuid4().hex}")


def written_beside(path: Path, data: bytes, *, is_synced: bool = True) -> Appended:
    """Return a new file beside a path's, with this in it and on disk: renamed, it is the path's.

    Args:
        is_synced: whether to wait for the disk.

    Raises:
        SaveError: it could not be written; nothing is left of it. OSError: the folder takes no file.
    """
    file = Appended(set_apart(path), is_new=True)
    try:
        file.write(data)
        file.sync() if is_synced else file.flush()
    except BaseException:
        file.abandon()
        raise
    return file


def write_over(path: Path, data: bytes, *, is_synced: bool = True) -> None:
    """Give a file other content, whole or not at all, and never through a link that somebody laid.

    Raises:
        OSError: as of `written_beside`; what was there is as it was.
    """
    file = written_beside(path, data, is_synced=is_synced)
    try:
        file.rename(path)
    except BaseException:
        file.abandon()
        raise
    file.close()


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk; raises `OSError` where that fails."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems sync no folders, and say so
            raise
    finally:
        os.close(descriptor)


def not_written(
    path: Path,
    error: OSError,
    expected: str = "room, and leave to write",
    way_out: str = "What was there is as it was.",
) -> SaveError:
    """Return the error that names a file or folder which the file system did not take, or did not let go."""
    given = f"a file system that says: {error.strerror or error}"
    said = SaveError(str(path), given=given, expected=expected, way_out=way_out)
    said.errno = error.errno
    return said
