"""Ranks of a real job exchange figures whether they meet on their machine or not, and wait no longer than they may."""

from __future__ import annotations

import pytest
from ranks import run_ranks

RANK = """
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from trimtab.distributed import host_gather, process_group
    from trimtab.distributed.host_gather import RankExchange

    rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    minutes = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=minutes)
    asked, gather, listening = [], dist.all_gather_object, host_gather._listening

    def gathering(*args, **options):
        asked.append(1)
        gather(*args, **options)

    def elsewhere(*args):
        listener, path = listening(*args)
        return listener, f"{folder}/elsewhere{path}"

    dist.all_gather_object = gathering
    if case == "apart" and rank == 0:
        host_gather._listening = elsewhere

    for asks in (3, 6) if case == "together" else (2, 2):
        exchange = RankExchange(None)
        assert exchange.share([rank + 0.5]) == [[0.5], [1.5]]
        assert (exchange._mesh is not None) == (case == "together")
        assert len(asked) == asks, asked
        exchange.close()

    process_group.limit_host(0.3)
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            assert "300ms" in str(error), error
        else:
            raise AssertionError("a rank that does not come was not missed")
        process_group.job_store().set("missed", "")
    else:
        process_group.job_store().wait(["missed"], minutes)
"""


@pytest.mark.parametrize("case", ["together", "apart"])
def test_ranks_exchange_figures_where_they_meet_and_where_they_cannot(tmp_path, case):
    run_ranks(RANK, tmp_path, case)
