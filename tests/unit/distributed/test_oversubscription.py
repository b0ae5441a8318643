"""Ranks that share what should be one's own: cores, their time, or a device."""

from __future__ import annotations

import json

import pytest
import torch
from ranks import run_ranks

from trimtab.distributed import cpu_affinity
from trimtab.distributed.cpu_affinity import RankPlacement, oversubscribed_resource, resource_of_placements

FOUR = (0, 1, 2, 3)


def seats(*cores: tuple[int, ...], threads: int = 1, **others) -> list[RankPlacement]:
    return [RankPlacement("a", each, threads, **others) for each in cores]


@pytest.mark.parametrize(
    ("cores", "threads", "said"),
    [
        ([FOUR] * 4, 1, ""),
        ([FOUR] * 5, 1, "cores"),
        ([FOUR] * 2, 2, ""),
        ([FOUR] * 3, 2, "cores"),
        ([(0,), (1,), (2,), (3,)], 1, ""),  # each bound to its own
        ([(0,), (0,)], 1, "cores"),
        ([(0, 1), (2, 3)], 2, ""),
        ([(0, 1, 2), (3,)], 2, "cores"),  # as many as threads, but not where they are
        ([(0,), (0,), (1, 2, 3)], 1, "cores"),
    ],
)
def test_threads_are_held_against_the_cores_they_are_bound_to(cores, threads, said):
    assert resource_of_placements(seats(*cores, threads=threads)) == said


def test_ranks_of_several_nodes_share_no_cores():
    assert resource_of_placements([RankPlacement("a", (0,), 1), RankPlacement("b", (0,), 1)]) == ""
    assert resource_of_placements([RankPlacement("a", FOUR, 1), RankPlacement("b", (0,), 2)]) == "cores"


def test_a_quota_is_of_all_that_are_under_it():
    assert resource_of_placements(seats(FOUR, FOUR, quotas={"pod": 2.0})) == ""
    assert resource_of_placements(seats(FOUR, FOUR, quotas={"pod": 1.5})) == "cores"
    one, other = (RankPlacement("a", FOUR, 1, quotas={name: 1.0, "above": 2.0}) for name in ("one", "other"))
    assert resource_of_placements([one, other]) == ""
    assert resource_of_placements([one, one]) == "cores"


def test_devices_are_told_apart_by_their_own_names():
    one, other = (RankPlacement("a", (0,), 8, device=name) for name in ("GPU-1", "GPU-2"))
    assert resource_of_placements([one, other]) == ""
    assert resource_of_placements([one, one]) == "devices"
    assert resource_of_placements([one, RankPlacement("b", (0,), 8, device="GPU-1")]) == ""


def test_one_process_says_what_it_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu_affinity, "own_cores", lambda: frozenset(FOUR))
    monkeypatch.setattr(cpu_affinity, "quotas", lambda: {"pod": 2.0})
    for threads, said in ((2, ""), (3, "cores")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert oversubscribed_resource() == said


RANK = """
    import json, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from trimtab.distributed import cpu_affinity
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    cpu_affinity.quotas = lambda: {}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = []
    for cores in ({0, 1}, {rank}, {0}):
        cpu_affinity.own_cores = lambda: frozenset(cores)
        found.append(cpu_affinity.oversubscribed_resource())
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
"""


def test_ranks_look_at_what_all_of_them_have(tmp_path):
    run_ranks(RANK, tmp_path)
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == ["", "", "cores"]
