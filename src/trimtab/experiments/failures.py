"""What an arm's own code raised, in words."""

from __future__ import annotations

from typing import NoReturn

from trimtab.core.errors import LoopError, TrimtabError

_MAX_MESSAGE = 200


def in_words(error: Exception) -> str:
    """Return `Type: message`, the first line of it."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:_MAX_MESSAGE]}"


def blame_reference(error: Exception) -> NoReturn:
    """Raise what ends a comparison whose reference, which all is held against, failed.

    Raises:
        TrimtabError: as it came, where it was one. LoopError: else, raised from the original.
    """
    if isinstance(error, TrimtabError):
        raise error
    raise LoopError(
        "reference loop",
        given=in_words(error),
        expected="a loop that trains",
        way_out="TRIMTAB_TRACEBACK=1 shows where it was raised.",
    ) from error
