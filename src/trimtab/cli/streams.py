"""Safe standard streams, for closed descriptors and limited encodings."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def prepare_streams() -> None:
    """Open closed standard streams on the null device, and escape characters missing in a stream's encoding.

    The next opened file would otherwise receive a closed stream's descriptor, and printed text would end up in the
    file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null(descriptor)
    sys.stdin = sys.stdin or _null(0)
    sys.stdout = sys.stdout or _null(1)
    sys.stderr = sys.stderr or _null(2)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and getattr(stream, "errors", "") in ("strict", "surrogateescape"):
            reconfigure(errors="backslashreplace")


def can_encode(text: str) -> bool:
    """Return True if standard output can encode the text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _open_null(descriptor: int) -> None:
    """Open the null device under a closed descriptor, for reading and writing like a terminal."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)


def _null(descriptor: int) -> TextIO:
    return open(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", errors="backslashreplace", closefd=False)
