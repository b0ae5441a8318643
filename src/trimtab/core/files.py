"""Reading files that a user names: regular files only, and none larger than its kind can be.

A pipe or a device would block or never end; a file of many gigabytes would fill memory before anything is checked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from trimtab.core.errors import FormatError
from trimtab.core.units import format_bytes

# The largest file of each kind: about a hundred times the largest that is written.
JSON_BYTES = 2**27  # a plan, profile, result or state of a command
SMALL_JSON_BYTES = 2**24  # the settings of a command
STATE_BYTES = 2**31  # the part of a checkpoint that is JSON
RECORD_BYTES = 2**34
LINE_BYTES = 2**24  # a line of a record: its header holds a plan
CSV_BYTES = 2**24
DATA_BYTES = 2**34  # a data set's file


def open_regular(path: str | Path, expected: str, *, limit: int) -> BinaryIO:
    """Open a regular file for reading bytes.

    Args:
        expected: what it should hold, for the error. limit: bytes that it may have.

    Raises:
        FormatError: it cannot be opened (code "file.unreadable"), is a folder, pipe, device or socket
            ("file.not_regular"), or is larger ("file.too_large").
    """
    try:
        # Without O_NONBLOCK opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise unreadable(path, error, expected) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(
                str(path),
                given=f"a {_kind(found.st_mode)}",
                expected=f"{expected}, in a regular file",
                way_out="Write its content to a file, and name that.",
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
            content = file.read(limit + 1)  # a file that grows, or whose size the system does not know
        except OSError as error:
            raise unreadable(path, error, expected) from None
    if len(content) > limit:
        raise too_large(path, len(content), expected, limit)
    return content


def read_text(path: str | Path, expected: str, *, limit: int = JSON_BYTES) -> str:
    """Return the text of a regular file in UTF-8; arguments and errors as of `open_regular`.

    Raises:
        FormatError: it is not UTF-8 (code "file.not_text").
    """
    content = read_bytes(path, expected, limit=limit)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), given=str(error), expected=expected, code="file.not_text") from None


def too_large(path: str | Path, size: int, expected: str, limit: int) -> FormatError:
    """Return the error for a file that is larger than its kind can be."""
    return FormatError(
        str(path),
        given=f"{format_bytes(size)} or more",
        expected=f"{expected}, of at most {format_bytes(limit)}",
        code="file.too_large",
    )


def unreadable(path: str | Path, error: Exception, expected: str) -> FormatError:
    """Return the error for a file that the system does not open or read."""
    return FormatError(
        str(path), given=f"nothing that can be read ({error})", expected=expected, code="file.unreadable"
    )


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "folder", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "device")
