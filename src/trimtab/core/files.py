"""Files: locks, bounded reading, and writing that leaves whole lines or whole files only, even if the disk is full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import uuid
import warnings
import weakref
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol

from trimtab.core.errors import FormatError, InUseError, SaveError
from trimtab.core.units import format_bytes

_HELD = (errno.EAGAIN, errno.EACCES)
_LOCKS = Path("/proc/locks")


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder. Returns False if another descriptor holds the lock; `OSError` without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def lock_if_possible(descriptor: int) -> bool:
    """Lock an open file or folder as `try_lock` does. Returns True if the file system does not support locks."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


class Lock(Protocol):
    """Holder of a lock that forked children inherit."""

    def release_in_child(self) -> None:
        """Close the descriptors in a forked child: its copies would keep the lock after the parent has ended."""


_INHERITED: weakref.WeakSet[Lock] = weakref.WeakSet()


def release_in_children(lock: Lock) -> None:
    """Release a lock in every child that is forked from now on."""
    _register_once()
    _INHERITED.add(lock)


@functools.cache  # on first use rather than at import
def _register_once() -> None:
    def release() -> None:
        for lock in _INHERITED:
            lock.release_in_child()

    os.register_at_fork(after_in_child=release)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if a path still leads to an open file, which was neither deleted nor replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def require_unlocked(path: Path) -> None:
    """Raise `InUseError` if another run, of any process, holds a file or folder. The lock is not kept."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # Missing or unreadable: the later attempt to write reports it.
        return
    try:
        if not lock_if_possible(descriptor):
            raise in_use(path, holder_pid(descriptor))
    finally:
        os.close(descriptor)


def holder_pid(descriptor: int) -> int | None:
    """Return the process id of the lock's holder; None if unknown."""
    found = os.fstat(descriptor)
    at = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = _LOCKS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # Only Linux has /proc/locks.
        return None
    for line in lines:
        fields = line.split()  # 1: FLOCK ADVISORY WRITE 1234 08:02:1311 0 EOF
        if len(fields) == 8 and fields[1] == "FLOCK" and fields[5] == at and fields[4].isdigit():
            return int(fields[4]) or None  # 0 means a process of another container.
    return None


def in_use(path: Path, pid: int | None, holder: str = "") -> InUseError:
    """Return the error for an output that another run holds, described by `holder` or its process id."""
    who = holder or ("another process" if pid is None else "this process" if pid == os.getpid() else f"process {pid}")
    error = InUseError(
        str(path),
        got=f"an output that another run holds ({who})",
        problem=f"{path} is in use by another run ({who}).",
        hint="Wait until that run has ended, or choose another path.",
        code="output.in_use",
    )
    error.pid = pid
    return error


# Size limits per kind of file: about a hundred times the largest file that trimtab writes.
JSON_BYTES = 2**27  # A plan, profile, result or state of a command.
SMALL_JSON_BYTES = 2**24  # The settings of a command.
RECORD_BYTES = 2**34
LINE_BYTES = 2**24  # A line of a record; the header contains a plan.
CSV_BYTES = 2**24


def open_regular(path: str | Path, expected: str, *, limit: int) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises:
        FormatError: the file cannot be opened (code "file.unreadable"), is a folder, pipe, device or socket
            ("file.not_regular"), or is too large ("file.too_large").
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # A NUL in the path raises ValueError.
        raise unreadable_error(path, error, expected) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(
                str(path),
                got=f"a {_kind(found.st_mode)}",
                expected=f"a regular file with {expected}",
                hint="Write the content to a regular file, and pass the path of that file.",
                code="file.not_regular",
            )
        if found.st_size > limit:
            raise too_large(path, found.st_size, expected, limit)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, expected: str, *, limit: int) -> bytes:
    """Return the content of a regular file; arguments and errors as of `open_regular`."""
    with open_regular(path, expected, limit=limit) as file:
        try:
            content = file.read(limit + 1)  # The file may grow, or the system may not know its size.
        except OSError as error:
            raise unreadable_error(path, error, expected) from None
    if len(content) > limit:
        raise too_large(path, len(content), expected, limit)
    return content


def read_text(path: str | Path, expected: str, *, limit: int = JSON_BYTES) -> str:
    """Return the text of a regular file as `open_regular`; `FormatError` ("file.not_text") unless it is UTF-8."""
    content = read_bytes(path, expected, limit=limit)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            str(path), got=f"a file that is not UTF-8 ({error})", expected=expected, code="file.not_text"
        ) from None


def too_large(path: str | Path, size: int, expected: str, limit: int) -> FormatError:
    """Return the error for a file above the size limit of its kind."""
    return FormatError(
        str(path),
        got=f"at least {format_bytes(size)}",
        expected=f"{expected} of at most {format_bytes(limit)}",
        code="file.too_large",
    )


def unreadable_error(path: str | Path, error: Exception, expected: str) -> FormatError:
    """Return the error for a file that cannot be opened or read."""
    reason = getattr(error, "strerror", None) or str(error)
    return FormatError(str(path), got=f"an unreadable file ({reason})", expected=expected, code="file.unreadable")


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "folder", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "device")


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
        release_in_children(self)
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
        """Write buffered data to the operating system; `SaveError` with an unchanged file unless all was written."""
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
        """Rename the file and continue in a new one under the old name; `SaveError` if it could not be made."""
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

    Waits for the disk if `is_synced`. Raises `SaveError` without leaving a file, or `OSError` if none can be created.
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
    """Replace a file's content, or a symbolic link, atomically; `OSError` as of `written_beside`."""
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


def not_written(path: Path, error: OSError) -> SaveError:
    """Return the error for a file or folder that the file system could not write or remove."""
    made = SaveError(
        str(path),
        got=f"the error {str(error.strerror or error)!r}",
        expected="free disk space and write permission",
        hint="The existing content is unchanged.",
    )
    made.errno = error.errno
    return made
