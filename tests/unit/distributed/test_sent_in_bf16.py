"""Gradients of shards that are sent in bf16: of a group of one rank, in this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from raising import raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from trimtab.core.errors import OptimizerError
from trimtab.distributed.fsdp2 import FsdpShards, require_step_of_shards

MICRO = 9
SMALL = 2.0**-9  # what bf16 drops beside 1


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def gradient_of(mesh, stage: int, **how) -> torch.Tensor:
    """Return the gradient of a window whose first micro-batch has one of 1, and each of the others a small one."""
    model = nn.Sequential(nn.Linear(1, 4, bias=False))
    shards = FsdpShards(stage, mesh, **how)
    shards.make(model)
    for index in range(MICRO):
        shards.begin(last=index == MICRO - 1)
        model(torch.tensor([[SMALL if index else 1.0]])).sum().backward()
    return next(model.parameters()).grad.full_tensor()


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_summed_in_fp32_and_sent_in_bf16(mesh, stage, monkeypatch):
    found = gradient_of(mesh, stage, reduces_once=True, reduce_dtype="bf16")
    whole = torch.tensor(1 + (MICRO - 1) * SMALL)
    assert found.dtype is torch.float32
    assert found.unique() == whole.bfloat16().float() != 1  # what FSDP2 by itself makes of them
    found = gradient_of(mesh, stage, reduces_once=False, reduce_dtype="bf16")
    assert found.unique() == 1 + (MICRO - 1) * SMALL
    model = nn.Sequential(nn.Linear(1, 4, bias=False))
    FsdpShards(stage, mesh, reduces_once=True, reduce_dtype="bf16").make(model)
    model(torch.tensor([[1 + 2.0**-9]])).sum().backward()
    assert next(model.parameters()).grad.full_tensor().unique() == 1


def test_a_fused_step_of_shards_is_refused_for_optimizers_without_one():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, fused=True)
    with raises(OptimizerError, code="optimizer.fused_with_shards", field="optimizer"):
        require_step_of_shards(optimizer)
