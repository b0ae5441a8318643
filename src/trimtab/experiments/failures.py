"""What ends a comparison: a reference that fails."""

from __future__ import annotations

from typing import NoReturn

from trimtab.calibrate.failures import describe
from trimtab.core.errors import LoopError, TrimtabError


def blame_reference(error: Exception) -> NoReturn:
    """Raise what ends a comparison whose reference, which all is held against, failed.

    Raises:
        TrimtabError: as it came, where it was one. LoopError: else, raised from the original.
    """
    if isinstance(error, TrimtabError):
        raise error
    raise LoopError(
        "reference loop",
        given=describe(error),
        expected="a loop that trains",
        way_out="TRIMTAB_TRACEBACK=1 shows where it was raised.",
    ) from error
