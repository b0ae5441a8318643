"""Ranks that make something in turn wait for each other: as long as each lives, and not for one that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks

RANK = """
    import json, os, sys, time
    import torch
    import torch.distributed as dist
    from trimtab.distributed.process_group import limited_to
    from trimtab.experiments.comparison_context import comparison_ranks

    rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

    def load():
        if rank and case == "long":
            time.sleep(2.5)
        if rank and case == "raises":
            raise ValueError("no room for the data")
        return rank

    found, start = {}, time.monotonic()
    try:
        with limited_to(0.8 if case == "long" else 30.0), comparison_ranks() as ranks:
            found["made"] = [ranks.in_turn(load), ranks.in_turn(lambda: 5)]
            found["each"] = ranks.each(rank)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found |= {name: getattr(error, name, None) for name in ("is_echo", "code", "ranks")}
    found["seconds"] = time.monotonic() - start
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump(found, file)
    os._exit(0)
"""


def run(folder: Path, case: str) -> list[dict]:
    run_ranks(RANK, folder, case)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ["short", "long"])
def test_a_rank_may_take_longer_than_the_time_limit(tmp_path, case):
    for rank, each in enumerate(run(tmp_path, case)):
        assert "error" not in each, each
        assert each["made"] == [rank, 5]
        assert each["each"] == [0.0, 1.0]


def test_one_that_fails_ends_all_by_its_reason_and_at_once(tmp_path):
    one, other = run(tmp_path, "raises")
    assert other["error"] == "ValueError: no room for the data"
    assert one["error"].startswith("RankError")
    assert (one["code"], one["ranks"]) == ("ranks.ended", [1])
    assert "ValueError: no room for the data" in one["error"]
    assert one["is_echo"]
    assert one["seconds"] < 20
