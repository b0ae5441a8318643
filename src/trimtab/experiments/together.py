"""A comparison on one process or on several ranks, which all end by one reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed as dist

from trimtab.distributed.alone import ALONE, Together
from trimtab.distributed.in_step import Ranks


@contextlib.contextmanager
def together() -> Iterator[Together]:
    """Be one of the ranks that were joined, or one process; an error ends all of them by one reason.

    Raises:
        RankError: another rank ended.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield ALONE
        return
    ranks = Ranks()
    try:
        yield ranks
    except BaseException as error:
        _raise(ranks.ended(error), error)
    ranks.close()


def _raise(reason: BaseException, error: BaseException) -> NoReturn:
    if reason is error:
        raise error
    raise reason from error
