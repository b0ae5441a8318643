"""What every rank does by itself and may take long at, each in its own time: all wait while the others live."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch.distributed as dist

from trimtab.core.errors import RankError
from trimtab.distributed.heartbeat import Silence, awaited, beating, say
from trimtab.distributed.launched import SILENT
from trimtab.distributed.process_group import from_first, job_store, time_limit_s


def words_at_work(make: Callable[[], str], topic: str) -> list[str]:
    """Return what each rank makes, on all of them; waits for as long as the slowest takes.

    Rank 0 hears the others and tells them all, so that what goes over the store grows with the ranks, not their square.

    Args:
        topic: asked of once in a job.

    Raises:
        RankError: a rank gives no sign of life for longer than the time limit, or failed.
    """
    store, limit_s, rank = job_store(), time_limit_s(), dist.get_rank()
    keys = [f"trimtab/at_work/{topic}/{each}" for each in range(dist.get_world_size())]

    def all_said() -> str:
        own = make()
        return json.dumps([own, *(_word_of(store, each, keys[each], limit_s) for each in range(1, len(keys)))])

    if rank:
        with beating(store, keys[rank], limit_s):
            own = make()
        say(store, keys[rank], own, readers=1)
    return list(json.loads(from_first(all_said, topic)))


def _word_of(store: dist.Store, rank: int, key: str, limit_s: float) -> str:
    try:
        return awaited(store, key, limit_s)
    except Silence as silence:
        raise RankError(
            f"rank {rank}",
            given=str(silence),
            expected="its part of what all do",
            way_out="It was stopped, killed, or its machine is gone: look at its own log and its machine's.",
            code=SILENT,
        ) from silence
