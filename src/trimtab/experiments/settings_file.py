"""Settings file of an output folder, compared when a command resumes."""

from __future__ import annotations

from pathlib import Path

from trimtab.core.errors import DamagedError
from trimtab.core.files import SMALL_JSON_BYTES, read_text
from trimtab.core.serialization import parse

NAME = "settings.json"


def read_settings(folder: Path) -> dict[str, str]:
    """Return the settings stored in a folder.

    Raises:
        FormatError: the file cannot be read.
        DamagedError: the file is damaged.
    """
    path = folder / NAME
    text = read_text(path, "the JSON file of a command's settings", limit=SMALL_JSON_BYTES)
    try:
        found = dict(parse(text))
        if not all(isinstance(value, str) for value in found.values()):
            raise ValueError("a value is not a string")
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(
            str(path),
            problem=f"The settings file {path} is damaged: {error}.",
            hint="Name another folder with --out, or delete this one.",
            code="settings.damaged",
        ) from None
