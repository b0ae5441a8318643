"""Cores of this process, and ranks that share what should be one's own: cores, their time, or a device."""

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
    own_cores,
    quotas,
    resource_of_placements,
)


def group(root, path: str, **files: str):
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    return folder


def of(tmp_path, line: str) -> list[float]:
    """Return the quotas of a process whose groups are these, from its own group upwards."""
    (tmp_path / "own").write_text(line + "\n")
    return list(quotas(tmp_path / "sys", tmp_path / "own").values())


def test_every_group_above_has_its_quota(tmp_path):
    root = tmp_path / "sys"
    group(root, "", cpu__max="max 100000")
    group(root, "pod", cpu__max="400000 100000")
    group(root, "pod/job", cpu__max="50000 20000")
    assert of(tmp_path, "0::/pod/job") == [2.5, 4.0]
    assert of(tmp_path, "0::/pod") == [4.0]
    assert of(tmp_path, "0::/") == []


def test_quotas_of_cgroups_of_both_versions_are_read_and_told_apart(tmp_path):
    root = tmp_path / "sys"
    group(root, "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(root, "cpu/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert of(tmp_path, "5:memory:/elsewhere\n4:cpu,cpuacct:/job\n0::/job") == [1.5]
    root = tmp_path / "sys"
    for name in ("one", "other"):
        group(root, name, cpu__max="100000 100000")
        (tmp_path / name).write_text(f"0::/{name}\n")
    one, other = (quotas(root, tmp_path / name) for name in ("one", "other"))
    assert one.keys() != other.keys()
    assert one == quotas(root, tmp_path / "one")


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    group(tmp_path / "sys", "", cpu__max="200000 100000")
    assert of(tmp_path, "0::/docker/0123") == [2.0]
    assert of(tmp_path, "0::/../other") == [2.0]


@pytest.mark.parametrize("text", ["", "max", "many 100000", "100000 0"])
def test_what_says_nothing_limits_nothing(tmp_path, text):
    group(tmp_path / "sys", "", cpu__max=text)
    assert of(tmp_path, "0::/") == []
    assert quotas(tmp_path / "none", tmp_path / "nothing") == {}


def test_cores_and_node_of_a_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert own_cores() == frozenset({3, 5})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert own_cores() == frozenset({0, 1, 2})
    assert node() == node() != ""


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


def test_placements_on_several_nodes_quotas_and_devices():
    assert resource_of_placements([RankPlacement("a", (0,), 1), RankPlacement("b", (0,), 1)]) == ""
    assert resource_of_placements([RankPlacement("a", FOUR, 1), RankPlacement("b", (0,), 2)]) == "cores"
    assert resource_of_placements(seats(FOUR, FOUR, quotas={"pod": 2.0})) == ""
    assert resource_of_placements(seats(FOUR, FOUR, quotas={"pod": 1.5})) == "cores"
    one, other = (RankPlacement("a", FOUR, 1, quotas={name: 1.0, "above": 2.0}) for name in ("one", "other"))
    assert resource_of_placements([one, other]) == ""
    assert resource_of_placements([one, one]) == "cores"
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
    from trimtab.distributed import cpu_affinity
    cpu_affinity.quotas = lambda: {}
    found = []
    for cores in ({0, 1}, {rank}, {0}):
        cpu_affinity.own_cores = lambda: frozenset(cores)
        found.append(cpu_affinity.oversubscribed_resource())
"""


def test_ranks_look_at_what_all_of_them_have(tmp_path):
    assert run_cases(RANK, tmp_path, "all") == [[["", "", "cores"]] * 2]
