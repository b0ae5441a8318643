"""Advisory locks on outputs that two runs must not write at once.

The lock is on the open file or folder itself (flock), not on a name beside it: it ends with its process however that
ends, two descriptors of one process exclude each other too, and deleting or replacing a lock's file does not free it.
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
    """Lock an open file or folder; returns False if it is locked through another descriptor.

    Raises:
        OSError: its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def lock_if_possible(descriptor: int) -> bool:
    """Lock an open file or folder as `try_lock` does; returns True on a file system without locks."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one of a path, and was not deleted or replaced since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def require_unlocked(path: Path) -> None:
    """Raise if another run holds a file or folder; nothing is changed, and nothing is held afterwards.

    Raises:
        InUseError: another run, of this process or another, writes there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # there is none, or it cannot be read: whoever opens it for writing reports that
        return
    try:
        if not lock_if_possible(descriptor):
            raise in_use(path, holder_pid(descriptor))
    finally:
        os.close(descriptor)


def holder_pid(descriptor: int) -> int | None:
    """Return the process that locked an open file; None if the system does not say."""
    found = os.fstat(descriptor)
    at = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = _LOCKS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        fields = line.split()  # 1: FLOCK ADVISORY WRITE 1234 08:02:1311 0 EOF
        if len(fields) == 8 and fields[1] == "FLOCK" and fields[5] == at and fields[4].isdigit():
            return int(fields[4]) or None  # 0: of another container
    return None


def in_use(path: Path, pid: int | None, holder: str = "") -> InUseError:
    """Return the error for an output that another run holds.

    Args:
        holder: in words; "": the process by its number.
    """
    who = holder or ("another process" if pid is None else "this process" if pid == os.getpid() else f"process {pid}")
    error = InUseError(
        str(path),
        given=f"an output that another run holds ({who})",
        expected="one run at a time",
        way_out="Wait until that run has ended, or choose another path.",
        code="output.in_use",
    )
    error.pid = pid
    return error
