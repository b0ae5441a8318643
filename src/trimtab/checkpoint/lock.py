"""One run a folder: a lock that the kernel lets go of with the process, however that ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from trimtab.core.appended import sync
from trimtab.core.errors import FormatError
from trimtab.core.locks import holder_pid, in_use, is_at, lock_if_possible, try_lock

NAME = "run.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder, or that held it and ended without a word."""

    pid: int
    host: str
    boot_id: str

    @classmethod
    def here(cls) -> Holder:
        """Return this process."""
        try:
            boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:  # not Linux
            boot_id = ""
        return cls(os.getpid(), socket.gethostname(), boot_id)

    @classmethod
    def said(cls, text: bytes) -> Holder | None:
        """Return who a lock's file says; None where it says nobody."""
        try:
            data = json.loads(text)
            return cls(int(data["pid"]), f"{data['host']!s:.80}", f"{data['boot_id']!s:.40}")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """A folder held by this process, until `release` or the end of a `with` block. Made by `locked`.

    Attributes:
        recovered: who held it and was killed; None where the last one let go of it.
    """

    def __init__(self, descriptor: int, folder: int, recovered: Holder | None) -> None:
        self._descriptor: int | None = descriptor
        self._folder = folder
        self.recovered = recovered
        _forget_in_children()
        _LOCKS.add(self)

    def release(self) -> None:
        """Let go; the file stays, as another may hold it by now.

        On a disk that takes no more writes it still says who held it, as of one that was killed.
        """
        if self._descriptor is not None:
            try:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
            finally:
                self.forget()

    def forget(self) -> None:
        """Close the file and the folder: a forked child's copy of them would keep the lock beyond its parent's end."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            os.close(self._folder)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def opened(folder: Path, field: str = "checkpoints.folder") -> Lock:
    """Return the lock of a run's folder, which is made where it is not there.

    Args:
        field: what an error is about.

    Raises:
        FormatError: it cannot be made or written; or as of `locked`.
    """
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        if missing:
            folder.mkdir(parents=True, exist_ok=True)  # another run may make it too, and the lock says whose it is
        for each in missing:
            sync(each.parent)  # or a power cut takes it, with all that is in it by then
        return locked(folder)
    except OSError as error:
        given, expected = f"{folder} ({error.strerror or error})", "a folder that can be written, or made"
        raise FormatError(field, given=given, expected=expected) from None


def locked(folder: Path) -> Lock:
    """Hold a folder for this process.

    The folder itself is locked, and in it a file that names the holder: deleting the file does not free the folder.

    Raises:
        InUseError: another run, of this process or another, holds it. FormatError: its file system has no locks.
        OSError: it is no folder that can be written.
    """
    whole = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor, holder = _locked_file(folder, whole)
    except BaseException:
        os.close(whole)
        raise
    return Lock(descriptor, whole, holder)


def _locked_file(folder: Path, whole: int) -> tuple[int, Holder | None]:
    """Return the locked file of a folder, and who held it and ended without a word."""
    is_free = lock_if_possible(whole)  # some file systems lock files alone
    while True:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            holder = _taken(folder, descriptor, is_free=is_free, whole=whole)
            if is_at(descriptor, folder / NAME):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(Holder.here())).encode(), 0)
                return descriptor, holder
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was deleted or replaced between the two calls


def _taken(folder: Path, descriptor: int, *, is_free: bool, whole: int) -> Holder | None:
    """Lock an open file; returns who held it and ended without a word."""
    try:
        is_free = try_lock(descriptor) and is_free
    except OSError as error:
        given = f"a file system that has no locks ({error.strerror})"
        way_out = "Choose a folder on a disk of this machine."
        raise FormatError(str(folder), given=given, expected="one run a folder", way_out=way_out) from None
    holder = Holder.said(os.pread(descriptor, 1000, 0))
    if not is_free:
        pid = holder.pid if holder is not None else holder_pid(whole)
        raise in_use(folder, pid, "" if holder is None else str(holder))
    return holder


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


@functools.cache  # once, and not at import
def _forget_in_children() -> None:
    os.register_at_fork(after_in_child=lambda: [lock.forget() for lock in _LOCKS])
