"""Cores of this process, and ranks that share what should be one's own: cores, or a device."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import run_cases

from trimtab.distributed import cpu_affinity
from trimtab.distributed.cpu_affinity import (
    RankPlacement,
    node,
    oversubscribed_resource,
    resource_of_placements,
)
from trimtab.measure.machine import own_cores


def test_cores_and_node_of_a_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert own_cores() == frozenset({3, 5})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert own_cores() == frozenset({0, 1, 2})
    assert node() == node() != ""


FOUR, ONE = (0, 1, 2, 3), frozenset({0})


def seats(*cores: tuple[int, ...], threads: int = 1, **others) -> list[RankPlacement]:
    return [RankPlacement("a", frozenset(each), threads, **others) for each in cores]


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


def test_placements_on_several_nodes_and_devices():
    assert resource_of_placements([RankPlacement("a", ONE, 1), RankPlacement("b", ONE, 1)]) == ""
    assert resource_of_placements([RankPlacement("a", frozenset(FOUR), 1), RankPlacement("b", ONE, 2)]) == "cores"
    one, other = (RankPlacement("a", ONE, 8, device=name) for name in ("GPU-1", "GPU-2"))
    assert resource_of_placements([one, other]) == ""
    assert resource_of_placements([one, one]) == "devices"
    assert resource_of_placements([one, RankPlacement("b", ONE, 8, device="GPU-1")]) == ""


def test_one_process_says_what_it_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu_affinity, "own_cores", lambda: frozenset(FOUR))
    for threads, said in ((4, ""), (5, "cores")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert oversubscribed_resource() == said


RANK = """
    from trimtab.distributed import cpu_affinity
    found = []
    for cores in ({0, 1}, {rank}, {0}):
        cpu_affinity.own_cores = lambda: frozenset(cores)
        found.append(cpu_affinity.oversubscribed_resource())
"""


def test_ranks_look_at_what_all_of_them_have(tmp_path):
    assert run_cases(RANK, tmp_path, "all") == [[["", "", "cores"]] * 2]
