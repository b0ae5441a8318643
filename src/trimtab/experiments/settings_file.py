"""What a command writes into its folder first: the settings by which it may be gone on with."""

from __future__ import annotations

import json
from pathlib import Path

from trimtab.core.errors import FormatError

NAME = "settings.json"


def read_settings(folder: Path) -> dict[str, str]:
    """Return what a folder says of itself.

    Raises:
        FormatError: it is damaged.
    """
    path = folder / NAME
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        if not all(isinstance(value, str) for value in found.values()):
            raise ValueError("a value that is no text")
        return found
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FormatError(str(path), given=f"a damaged file ({error})", expected="a command's settings") from None
