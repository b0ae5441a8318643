"""One run a folder: a lock that the kernel lets go of with the process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from trimtab.core.errors import FormatError

NAME = "run.lock"


class RunLock:
    """Holds a folder for this process.

    Raises:
        FormatError: another process holds it, and which; or the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
            os.pwrite(self._descriptor, holder.encode(), 0)
        except OSError as error:
            said = self._said()
            self.release()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                given, way_out = f"a folder that cannot be locked ({error})", "Choose one on a disk of this machine."
            else:
                given, way_out = f"a folder that another run holds{said}", "Wait for its end, or choose another folder."
            raise FormatError(str(folder), given=given, expected="one run a folder", way_out=way_out) from None

    def _said(self) -> str:
        assert self._descriptor is not None
        try:
            holder = json.loads(os.pread(self._descriptor, 1000, 0))
            return f" (process {int(holder['pid'])} on {holder['host']!s:.80})"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def release(self) -> None:
        """Let go; the file stays, as another may hold it by now."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
