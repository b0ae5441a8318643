"""Context of a comparison on a single process or several ranks, with a common error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed as dist

from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.distributed.rank_coordinator import RankCoordinator


@contextlib.contextmanager
def comparison_ranks() -> Iterator[Coordinator]:
    """Yield the ranks of the job, or a single process; an error on any rank is raised on all ranks.

    Raises:
        RankError: another rank ended.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield ALONE
        return
    ranks = RankCoordinator()
    try:
        yield ranks
    except BaseException as error:
        _raise(ranks.ended(error), error)
    ranks.close()


def _raise(reason: BaseException, error: BaseException) -> NoReturn:
    if reason is error:
        raise error
    raise reason from error
