"""Bounded reading of files that a user names: regular files only, up to a size limit per kind.

A pipe or device could block or never end, and a huge file would fill memory before its content is checked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from trimtab.core.errors import FormatError
from trimtab.core.units import format_bytes

# Size limits per kind of file: about a hundred times the largest file that trimtab writes.
JSON_BYTES = 2**27  # A plan, profile, result or state of a command.
SMALL_JSON_BYTES = 2**24  # The settings of a command.
STATE_BYTES = 2**31  # The JSON part of a checkpoint.
RECORD_BYTES = 2**34
LINE_BYTES = 2**24  # A line of a record; the header contains a plan.
CSV_BYTES = 2**24
DATA_BYTES = 2**34  # A file of a data set.


def open_regular(path: str | Path, expected: str, *, limit: int) -> BinaryIO:
    """Open a regular file for reading bytes.

    Args:
        expected: description of the expected content, for the error.
        limit: largest size in bytes.

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
    """Return the text of a regular file in UTF-8; arguments and errors as of `open_regular`.

    Raises:
        FormatError: it is not UTF-8 (code "file.not_text").
    """
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
