"""Ranks that are not there, in a job whose ranks are: its own groups do all they did before."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
from raising import raises
from ranks import run_ranks
from torch import nn
from torch.distributed import distributed_c10d as c10d

from trimtab.core.errors import DependencyError, ModelError, ValueGivenError
from trimtab.core.parallelism import Parallelism
from trimtab.distributed import rank_memory
from trimtab.distributed.rank_memory import absent_ranks, mesh_of_all, trace_rank
from trimtab.planner.multi_rank_plan import WAYS
from trimtab.plans.profile import Candidate

pytestmark = pytest.mark.slow

JOB = """
    import copy, os, sys
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives
    from memory_rank import ROWS, Words, batch_of, loss
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel
    from trimtab.core.parallelism import Parallelism
    from trimtab.distributed import rank_memory
    from trimtab.distributed.rank_memory import trace_rank

    torch.set_num_threads(1)
    rank, size, folder, case = int(sys.argv[1]), 2, sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    if case == "meshes that are alike":
        rank_memory._MESH_NAMES = None
    if case == "ended as torch does":
        rank_memory._forget = dist.destroy_process_group
    rows = batch_of(2 * ROWS)

    def step(model, optimizer, part):
        optimizer.zero_grad()
        loss(model, part).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    class Trained:
        '''The same model in one process, by FSDP2 and by DDP.'''

        def __init__(self):
            torch.manual_seed(0)
            mesh = init_device_mesh("cpu", (size,))
            self.one = Words().double()
            self.shards, self.replica = copy.deepcopy(self.one), DistributedDataParallel(copy.deepcopy(self.one))
            for block in self.shards.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.shards, mesh=mesh)
            self.models = self.one, self.shards, self.replica
            self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in self.models]

        def steps(self):
            for _ in range(2):
                step(self.one, self.optimizers[0], rows)
                for model, optimizer in zip(self.models[1:], self.optimizers[1:]):
                    step(model, optimizer, rows[rank * ROWS : (rank + 1) * ROWS])
            for ours, shard, copied in zip(*(model.parameters() for model in self.models)):
                torch.testing.assert_close(shard.full_tensor(), ours, rtol=0, atol=1e-9)
                torch.testing.assert_close(copied, ours, rtol=0, atol=1e-9)

    def collective(group):
        ours = torch.full((3,), float(rank + 1))
        dist.all_reduce(ours, group=group)
        assert ours.tolist() == [3.0] * 3
        assert collectives.all_reduce(torch.full((3,), rank + 1.0), "sum", group).tolist() == [3.0] * 3
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")

    part = dist.new_group([0, 1])
    if case == "trained before":  # a job whose ranks have worked together before; else torch would remember that
        before = Trained()
        before.steps()
    names = dict(dist.distributed_c10d._world.pg_names)
    number = dist.distributed_c10d._world.group_count
    told = []
    if rank == 0:
        for stage in range(4):
            model = Words().double()  # of the same tensors as are trained: what is remembered is remembered of these
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            batches, how = (batch_of(2), batch_of(4)), Parallelism(size, stage)
            random = torch.get_rng_state()
            told.append(trace_rank(model, optimizer, loss, batches, (2, 4), how).peak_bytes(4))
            assert torch.equal(random, torch.get_rng_state())
        assert told == sorted(told, reverse=True) and told[3] < told[0]
    assert dist.distributed_c10d._world.pg_names == names
    assert dist.distributed_c10d._world.group_count == number
    dist.barrier()
    for group in (dist.group.WORLD, part, dist.new_group([0, 1])):
        collective(group)
    whole, mesh = torch.arange(8.0), init_device_mesh("cpu", (size,))
    shared = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal((shared * 2 + 1).redistribute(mesh, [Replicate()]).to_local(), whole * 2 + 1)
    assert torch.equal((shared * 3).full_tensor(), whole * 3)
    Trained().steps()  # begun after the trace, and before it
    if case == "trained before":
        before.steps()
    dist.barrier()
    dist.destroy_process_group()
"""


def job(folder, monkeypatch, case: str) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
    run_ranks(JOB, folder, case)


@pytest.mark.parametrize("begun", ["trained before", "trained after alone"])
def test_all_that_a_job_does_together_works_after_a_trace(tmp_path, monkeypatch, begun):
    job(tmp_path, monkeypatch, begun)


@pytest.mark.parametrize("mutant", ["meshes that are alike", "ended as torch does"])
def test_that_is_seen_where_it_does_not(tmp_path, monkeypatch, mutant):
    with pytest.raises(AssertionError, match=r"Could not resolve the process group|Connection closed by peer"):
        job(tmp_path, monkeypatch, mutant)


def test_nothing_is_left_behind():
    found, hook, count = dict(os.environ), sys.excepthook, c10d._world.group_count
    with absent_ranks(4):
        mesh = mesh_of_all("cpu", 4)
        assert (dist.get_world_size(), dist.get_rank(), mesh.size()) == (4, 0, 4)
    with contextlib.suppress(RuntimeError), absent_ranks(2):
        raise RuntimeError
    assert not dist.is_initialized()
    assert (dict(os.environ), sys.excepthook, c10d._world.group_count) == (found, hook, count)
    with pytest.raises(RuntimeError, match="resolve the process group"):
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", mesh.get_group().group_name)


@pytest.mark.parametrize("name", ["_pg_map", "_World", "_unregister_process_group"])
def test_a_torch_that_has_its_groups_elsewhere_is_named(monkeypatch, name):
    monkeypatch.delattr(c10d, name)
    with raises(DependencyError, code="torch.version_unsupported", field="torch"), absent_ranks(2):
        pass


def test_a_torch_that_cannot_make_such_a_group_is_named(monkeypatch):
    def refuses(*args, **kwargs):
        raise TypeError("no such backend")

    monkeypatch.setattr(c10d, "init_process_group", refuses)
    with raises(DependencyError, code="torch.version_unsupported", field="torch"), absent_ranks(2):
        pass
    assert not dist.is_initialized()


def test_one_rank_has_no_others():
    with raises(ValueGivenError, code="value.invalid", field="ranks"), absent_ranks(1):
        pass


def test_parameters_that_torch_cannot_deal_out_are_named():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.double = nn.Linear(4, 4), nn.Linear(4, 4).double()

        def forward(self, rows):
            return self.double(self.single(rows).double())

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, how = (torch.ones(2, 4), torch.ones(4, 4)), Parallelism(2, 1)
    with raises(ModelError, code="model.not_traceable", field="model"):
        trace_rank(model, optimizer, lambda model, rows: model(rows).mean(), batches, (2, 4), how)
    assert not dist.is_initialized()


def test_each_way_to_share_is_traced_once(monkeypatch):
    """In windows of one micro-batch gradients are reduced once, whichever way: what that takes is not traced again."""
    traced, trace = [], rank_memory.trace_rank

    def noted(*args, num_micro_batches, **kwargs):
        how = args[5]
        traced.append((how.zero_stage, how.reduces_once, num_micro_batches))
        return trace(*args, num_micro_batches=num_micro_batches, **kwargs)

    monkeypatch.setattr(rank_memory, "trace_rank", noted)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    candidate = Candidate(precision="fp32", memory_layout="keep", fused_optimizer=False, micro_batch=4)
    found = rank_memory.trace_ways(model, optimizer, lambda model, b: model(b).mean(), torch.ones(4, 4), candidate, 2)
    assert [each.way for each in found] == list(WAYS)
    assert len(traced) == len(set(traced)) == len(WAYS) + 4
    each = trace(
        model,
        optimizer,
        lambda model, b: model(b).mean(),
        (torch.ones(2, 4), torch.ones(4, 4)),
        (2, 4),
        Parallelism(2, 3, reduces_once=False),
    )
    assert found[-1].way == (3, False)
    assert found[-1].whole.peak_bytes(4) == each.peak_bytes(4)
