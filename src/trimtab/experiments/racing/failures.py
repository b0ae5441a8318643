"""What ends a comparison: a reference that fails; on several ranks, any of them that fails alone."""

from __future__ import annotations

from typing import NoReturn

from trimtab.calibrate.failures import describe
from trimtab.core.errors import LoopError, TrimtabError
from trimtab.distributed.alone import Together


def blame_reference(error: BaseException) -> NoReturn:
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


def end_with(error: Exception, together: Together, *, is_reference: bool) -> NoReturn:
    """Raise what is behind an arm's error: its own, or the end of another rank.

    Raises:
        RankError: another rank ended. The rest as of `blame_reference`, or the error as it came.
    """
    reason = together.ended(error)
    if is_reference:
        blame_reference(reason)
    if reason is error:
        raise error
    raise reason from error
