"""Advisory locks on outputs, against two runs that write at the same time.

The open file or folder itself is locked (flock), not a separate lock file. The lock ends with the process, also
excludes a second descriptor of the same process, and survives deletion or replacement of the name.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from trimtab.core.errors import InUseError

_HELD = (errno.EAGAIN, errno.EACCES)
_LOCKS = Path("/proc/locks")


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder. Returns False if another descriptor holds the lock.

    Raises:
        OSError: the file system does not support locks.
    """
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


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if a path still leads to an open file, which was neither deleted nor replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def require_unlocked(path: Path) -> None:
    """Raise if another run holds a file or folder. Nothing is changed, and the lock is not kept.

    Raises:
        InUseError: another run, of this process or another, writes to the path.
    """
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
    """Return the error for an output that another run holds.

    Args:
        holder: description of the holder; by default the process id.
    """
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
