"""Lock on a run's folder, released by the kernel when the process ends for any reason."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.core.errors import FormatError
from trimtab.core.files import holder_pid, in_use, is_at, lock_if_possible, release_in_children, sync, try_lock

NAME = "run.lock"


@dataclass(frozen=True)
class LockHolder:
    """Holder of a folder's lock, possibly killed since."""

    pid: int
    host: str

    @classmethod
    def here(cls) -> LockHolder:
        """Return the current process."""
        return cls(os.getpid(), socket.gethostname())

    @classmethod
    def said(cls, text: bytes) -> LockHolder | None:
        """Return the holder recorded in a lock file, or None if the file is empty or invalid."""
        try:
            data = json.loads(text)
            return cls(int(data["pid"]), f"{data['host']!s:.80}")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """Lock held by this process until `release` or the end of a `with` block. Created by `locked`.

    Args:
        descriptors: The locked file, and the locked folder.

    Attributes:
        recovered: Previous holder if killed; None if the lock was released.
    """

    def __init__(self, descriptors: tuple[int, int], recovered: LockHolder | None) -> None:
        self._descriptors = descriptors
        self._is_open = True
        self.recovered = recovered
        release_in_children(self)

    def release(self) -> None:
        """Release the lock. The lock file stays, because another process may hold the file's lock already.

        If the disk rejects the write, the file still names this process, as after a kill.
        """
        if self._is_open:
            try:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptors[0], 0)
            finally:
                self.release_in_child()

    def release_in_child(self) -> None:
        """Close both descriptors. Forked children call this: their copies would prolong the lock beyond the parent."""
        if self._is_open:
            self._is_open = False
            for descriptor in self._descriptors:
                os.close(descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_run_folder(folder: Path, field: str = "checkpoints.folder") -> RunLock:
    """Create a run's folder if necessary and return its lock.

    Args:
        field: Name of the argument, for errors.

    Raises:
        FormatError: The folder cannot be created or written, or its file system has no locks.
        InUseError: Another run holds the lock.
    """
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        if missing:
            folder.mkdir(parents=True, exist_ok=True)  # another run may create it at the same time; the lock decides
        for each in missing:
            sync(each.parent)  # without the sync, a power failure could remove the folder with its contents
        return locked(folder)
    except OSError as error:
        raise FormatError(
            field,
            got=str(folder),
            problem=f"{folder} cannot be created or written ({error.strerror or error}).",
            hint="Pass a folder in which you can create files.",
            code="folder.not_writable",
        ) from None


def locked(folder: Path) -> RunLock:
    """Lock a folder for this process.

    Both the folder and a lock file with the holder's name are locked, so deleting the file does not release the lock.

    Raises:
        InUseError: Another run holds the lock, in this process or another.
        FormatError: The file system has no locks.
        OSError: The folder is not writable.
    """
    with contextlib.ExitStack() as opened:
        whole = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, whole)
        is_free = lock_if_possible(whole)  # some file systems can lock files but not folders
        while True:
            with contextlib.ExitStack() as tried:
                descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
                tried.callback(os.close, descriptor)
                holder = _taken(folder, descriptor, is_free=is_free, whole=whole)
                if is_at(descriptor, folder / NAME):  # else the file was deleted or replaced between open and lock
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(asdict(LockHolder.here())).encode(), 0)
                    tried.pop_all()
                    opened.pop_all()
                    return RunLock((descriptor, whole), holder)


def _taken(folder: Path, descriptor: int, *, is_free: bool, whole: int) -> LockHolder | None:
    """Lock an open file and return the previous holder if it was killed."""
    try:
        is_free = try_lock(descriptor) and is_free
    except OSError as error:
        raise FormatError(
            str(folder),
            problem=f"{folder} is on a file system without locks ({error.strerror}), so two runs could use it at once.",
            hint="Choose a folder on a local disk.",
            code="folder.no_locks",
        ) from None
    holder = LockHolder.said(os.pread(descriptor, 1000, 0))
    if not is_free:
        pid = holder.pid if holder is not None else holder_pid(whole)
        raise in_use(folder, pid, "" if holder is None else str(holder))
    return holder
