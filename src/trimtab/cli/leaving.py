"""How a rank ends: threads of gloo may outlive the interpreter, and then abort the process that was done."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_UNWRITTEN = 120  # Python's own status where what was printed could not be written


def leave(end: BaseException) -> NoReturn:
    """End the process as the interpreter would by this exception, without the interpreter's end.

    What is registered to run there does not.
    """
    code = _status(end)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it, or it is closed
            code = code or _UNWRITTEN
    os._exit(code)


def _status(end: BaseException) -> int:
    if not isinstance(end, SystemExit):
        sys.excepthook(type(end), end, end.__traceback__)
        return 1
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1
