"""Immediate exit of a rank: Gloo threads may outlive the interpreter and abort a process that has finished."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_UNWRITTEN = 120  # Python's own exit status if standard output could not be written


def exit_rank(end: BaseException) -> NoReturn:
    """End the process with the status that the interpreter would use for this exception, skipping exit handlers."""
    code = _status(end)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
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
