"""Gather results of long, independent work on every rank, with heartbeats instead of a fixed timeout."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from trimtab.distributed.heartbeat import HeartbeatTimeout, await_value, send_heartbeats, write_value
from trimtab.distributed.launched_rank import rank_lost
from trimtab.distributed.process_group import from_first, job_store, time_limit_s

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def words_at_work(make: Callable[[], str], topic: str) -> list[str]:
    """Return the results of `make` of all ranks; waits for the slowest.

    Rank 0 collects and redistributes the results, so store traffic grows linearly with the number of ranks.

    Args:
        make: called on every rank.
        topic: unique name within a job.

    Raises:
        RankError: a rank failed, or sent no heartbeat within the time limit.
    """
    store, limit_s, rank = job_store(), time_limit_s(), dist.get_rank()
    keys = [f"trimtab/at_work/{topic}/{each}" for each in range(dist.get_world_size())]

    def all_said() -> str:
        own = make()
        return json.dumps([own, *(_word_of(store, each, keys[each], limit_s) for each in range(1, len(keys)))])

    if rank:
        with send_heartbeats(store, keys[rank], limit_s):
            own = make()
        write_value(store, keys[rank], own, readers=1)
    return list(json.loads(from_first(all_said, topic)))


def _word_of(store: Store, rank: int, key: str, limit_s: float) -> str:
    try:
        return await_value(store, key, limit_s)
    except HeartbeatTimeout as silence:
        raise rank_lost(rank, str(silence)) from silence
