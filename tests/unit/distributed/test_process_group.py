"""Where a launcher put a process, and words between ranks of what takes long: waited for while a heart beats."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from raising import raises

from trimtab.core.errors import RankError, UsageError, ValueGivenError
from trimtab.distributed import process_group as group_module
from trimtab.distributed.host_gather import ErrorStore, RankExchange
from trimtab.distributed.process_group import JobPosition, job_position, process_group


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, JobPosition()),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, JobPosition(3, 8, 1)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}, JobPosition(3, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "9"}, JobPosition(0, 2, 0)),
        ({"RANK": "3"}, JobPosition()),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, JobPosition()),  # a script that sbatch runs, without srun
    ],
)
def test_launchers_are_known_by_their_variables(variables, found):
    assert job_position(variables) == found


def test_a_variable_that_is_no_number_is_named():
    with raises(UsageError, code="ranks.environment", field="WORLD_SIZE"):
        job_position({"RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK"),
        ({"SLURM_PROCID": "7", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID"),
        ({"RANK": "1.0", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "²", "WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK"),
    ],
)
def test_a_rank_that_the_job_does_not_have_is_refused(variables, field):
    with raises(ValueGivenError, code="ranks.environment", field=field):
        job_position(variables)


@pytest.mark.parametrize(
    ("address", "port", "field"),
    [
        ("no-such-machine.invalid", "29500", "MASTER_ADDR"),
        ("two words", "29500", "MASTER_ADDR"),
        ("a" * 70 + ".example", "29500", "MASTER_ADDR"),
        ("localhost", "none", "MASTER_PORT"),
        ("localhost", "70000", "MASTER_PORT"),
        ("localhost", "0", "MASTER_PORT"),
    ],
)
def test_a_place_to_meet_that_does_not_exist_is_refused_at_once(monkeypatch, address, port, field):
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with raises(ValueGivenError, code="ranks.environment", field=field), process_group():
        pass


def test_one_process_joins_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    with process_group() as here:
        assert here == JobPosition()


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_time_limit_that_is_none_is_refused(limit):
    with raises(UsageError, code="value.invalid", field="timeout_s"), process_group(limit):
        pass


def test_the_host_has_the_limit_that_was_asked_for_where_nccl_has_more(monkeypatch, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _number: None)
    make, given = dist.init_process_group, []

    def alone(names, rank, world_size, timeout):
        given.append((names, rank, world_size, timeout.total_seconds()))
        make("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, timeout=timeout)

    monkeypatch.setattr(dist, "init_process_group", alone)
    monkeypatch.setattr(group_module, "_has_joined", False)
    with process_group(7.0):
        host = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert host.options._timeout == timedelta(seconds=7)
    assert given == [("cpu:gloo,cuda:nccl", 0, 2, 37.0)]


def test_one_of_several_without_a_place_to_meet_is_told_what_is_missing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with raises(UsageError, code="ranks.environment", field="MASTER_ADDR and MASTER_PORT"), process_group():
        pass


@pytest.fixture
def own_group(monkeypatch, tmp_path):
    """A process group that the loop has made itself."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_group_that_is_there_has_the_limit_that_was_asked_for(own_group, monkeypatch, is_launched):
    if is_launched:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    with process_group(7.0):
        assert group_module.time_limit_s() == 7.0
        assert RankExchange(None)._timeout_s == 7.0
        with process_group():  # as a command does inside of it
            assert group_module.time_limit_s() == 7.0
    assert group_module.time_limit_s() == group_module.TIMEOUT_S
    assert dist.is_initialized()


def test_a_rank_that_does_not_answer_may_work_alone_and_the_limit_is_named(own_group, monkeypatch):
    trouble = ErrorStore(0)
    monkeypatch.setattr(trouble, "_roll_call", lambda: ({}, [1]))
    found = trouble.explained(RuntimeError("gloo: timed out"))
    assert (found.code, found.ranks) == ("ranks.silent", (1,))
    assert "evaluation" in found.hint
    assert "trimtab.process_group(timeout_s=...)" in found.hint


@pytest.fixture
def store():
    return dist.HashStore()


def test_a_word_may_take_longer_than_silence_does(store):
    with group_module.send_heartbeats(store, "slow", 0.4):
        late = threading.Timer(1.0, store.set, ("slow", "done"))
        late.start()
        assert group_module._word_of(store, 1, "slow", 0.4) == "done"
        late.join()


def test_a_rank_that_is_silent_is_named(store):
    start = time.monotonic()
    with raises(RankError, code="ranks.silent", field="rank 3"):
        group_module._word_of(store, 3, "never", 0.3)
    assert time.monotonic() - start < 5
