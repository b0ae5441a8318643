"""Text for terminals and files, of strings from outside: escape sequences and undecodable bytes are shown, not sent."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

# C0 without tab and newline, DEL, C1, and marks that reorder the text around them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return text whose control characters are written as escapes: a terminal would obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), encodable(text))


def encodable(text: str) -> str:
    """Return text that UTF-8 holds: bytes of a file name that are none stand in it as `\\udcff`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def quoted(path: Path) -> str:
    """Return a path as ASCII text, whatever bytes it has; `unquoted` returns it."""
    return quote_from_bytes(os.fsencode(path))


def unquoted(text: str) -> Path:
    """Return the path of `quoted`."""
    return Path(os.fsdecode(unquote_to_bytes(text)))
