"""Safe text for terminals and files: escape sequences and undecodable bytes are shown as escapes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

# C0 without tab and newline, DEL, C1, and characters that reorder the text around them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control_characters(text: str) -> str:
    """Return text with control characters written as escapes, because a terminal would interpret them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), to_encodable(text))


def to_encodable(text: str) -> str:
    """Return text that UTF-8 can encode; undecodable bytes of a file name become `\\udcff`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def quoted(path: Path) -> str:
    """Return a path of any bytes as ASCII text; `unquoted` reverses the encoding."""
    return quote_from_bytes(os.fsencode(path))


def unquoted(text: str) -> Path:
    """Return the path encoded by `quoted`."""
    return Path(os.fsdecode(unquote_to_bytes(text)))
