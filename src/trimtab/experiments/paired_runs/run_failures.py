"""Errors that end a comparison: a failed reference, or a failure of a single rank."""

from __future__ import annotations

from typing import NoReturn

from trimtab.core.errors import LoopError, TrimtabError
from trimtab.distributed.coordinator import Coordinator
from trimtab.profiling.measurement_notes import describe


def blame_reference(error: BaseException) -> NoReturn:
    """Raise the error that ends a comparison after a failure of the reference.

    Raises:
        TrimtabError: the original error, if of this type.
        LoopError: otherwise, raised from the original error.
    """
    if isinstance(error, TrimtabError):
        raise error
    raise LoopError(
        "baseline loop",
        problem=f"The task's baseline loop raised {describe(error).rstrip('.')}.",
        hint="Correct the task; a comparison needs a baseline that trains.",
        code="baseline.failed",
    ) from error


def end_with(error: Exception, together: Coordinator, *, is_reference: bool) -> NoReturn:
    """Raise the cause of an arm's error: the error itself, or the failure of another rank.

    Raises:
        RankError: another rank ended.
        LoopError: the reference failed; see `blame_reference`.
    """
    reason = together.ended(error)
    if is_reference:
        blame_reference(reason)
    if reason is error:
        raise error
    raise reason from error
