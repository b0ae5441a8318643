"""What cores a process may use: its own, and what the quotas of its control groups leave of them."""

from __future__ import annotations

import os

import pytest

from trimtab.distributed.cpu_affinity import node, own_cores, quotas


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


def test_older_groups_are_read(tmp_path):
    root = tmp_path / "sys"
    group(root, "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(root, "cpu/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert of(tmp_path, "5:memory:/elsewhere\n4:cpu,cpuacct:/job\n0::/job") == [1.5]


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    """Where /proc still says where it lies outside."""
    group(tmp_path / "sys", "", cpu__max="200000 100000")
    assert of(tmp_path, "0::/docker/0123") == [2.0]
    assert of(tmp_path, "0::/../other") == [2.0]


@pytest.mark.parametrize("text", ["", "max", "many 100000", "100000 0"])
def test_what_says_nothing_limits_nothing(tmp_path, text):
    group(tmp_path / "sys", "", cpu__max=text)
    assert of(tmp_path, "0::/") == []


def test_a_machine_without_groups_has_no_quota(tmp_path):
    assert quotas(tmp_path / "none", tmp_path / "nothing") == {}


def test_groups_are_told_apart(tmp_path):
    root = tmp_path / "sys"
    for name in ("one", "other"):
        group(root, name, cpu__max="100000 100000")
        (tmp_path / name).write_text(f"0::/{name}\n")
    one, other = (quotas(root, tmp_path / name) for name in ("one", "other"))
    assert one.keys() != other.keys()
    assert one == quotas(root, tmp_path / "one")


def test_a_process_may_use_the_cores_it_is_bound_to(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert own_cores() == frozenset({3, 5})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert own_cores() == frozenset({0, 1, 2})


def test_a_node_has_one_name():
    assert node() == node() != ""
