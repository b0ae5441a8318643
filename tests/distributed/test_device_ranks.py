"""What ranks on devices are asked by `tests/gpu`, asked of gloo's: of one rank, as one device allows, and of two."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device_rank import check
from ranks import run_program

from trimtab.distributed import process_group as group_module
from trimtab.distributed.process_group import backends, process_group
from trimtab.integrations import trainer_rules


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_ask_time_and_share_over_gloo(tmp_path, ranks):
    run_program(Path(__file__).parents[1] / "device_rank.py", tmp_path, "cpu", ranks=ranks)
    check([json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)], "gloo")


def test_a_figure_lies_where_the_group_can_send_it_from(monkeypatch):
    """A loop's own group may have NCCL alone: what is on the host cannot be reduced there."""
    for groups, kind in (("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu"), ("meta:nccl", "meta")):
        reduced = []
        monkeypatch.setattr(dist, "get_backend_config", lambda groups=groups: groups)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, reduced=reduced: reduced.append(tensor.device.type))
        with contextlib.suppress(RuntimeError):  # A meta tensor has no value.
            group_module.max_over_ranks(2.0)
        assert reduced == [kind]
    assert backends() == {"meta": "nccl"}


@pytest.fixture
def ended(monkeypatch):
    """How a job's groups were ended that `process_group` began, on what looks like two devices; and their limit."""
    found = []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.append(index))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda names, **how: found.append(how["timeout"].total_seconds()))
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(group_module, "limit_host", lambda _seconds: None)  # there is no group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: found.append("aborted"))
    return found


def test_nccl_waits_longer_than_what_names_a_lost_rank(ended):
    """Its watchdog ends the process, before which the rank has to say why."""
    with process_group(20.0):
        assert group_module.time_limit_s() == 20.0
    device, limit_s, how = ended
    assert (device, how) == (1, "destroyed")
    assert limit_s > 20.0 + 3.0  # as a roll call takes


def test_nccl_is_given_up_after_an_error(ended):
    with pytest.raises(ValueError, match="a bad batch"), process_group(20.0):
        raise ValueError("a bad batch")
    assert ended[2:] == ["aborted"]


def test_a_hosts_ranks_are_waited_for_as_long_as_the_host_does(ended, monkeypatch):
    monkeypatch.setattr(trainer_rules, "start", lambda *_: group_module.time_limit_s())
    with process_group(20.0):
        assert trainer_rules.start_in_process_group(None, None, None) == 1800.0
        assert trainer_rules.start_in_process_group(None, None, None, 90.0) == 90.0
        assert group_module.time_limit_s() == 20.0
