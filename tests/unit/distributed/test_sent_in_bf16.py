"""Gradients of shards that are sent in bf16: of a group of one rank, in this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from raising import raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from trimtab.core.errors import DependencyError
from trimtab.distributed import fsdp2
from trimtab.distributed.fsdp2 import FsdpShards, send_in_bf16

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
def test_micro_batches_are_added_up_in_fp32_and_rounded_as_they_are_sent(mesh, stage):
    found = gradient_of(mesh, stage, reduces_once=True, reduce_dtype="bf16")
    whole = torch.tensor(1 + (MICRO - 1) * SMALL)
    assert found.dtype is torch.float32
    assert found.unique() == whole.bfloat16().float() != 1  # what FSDP2 by itself makes of them


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_sent_after_each_micro_batch_is_added_up_in_fp32_too(mesh, stage):
    found = gradient_of(mesh, stage, reduces_once=False, reduce_dtype="bf16")
    assert found.unique() == 1 + (MICRO - 1) * SMALL


@pytest.mark.parametrize("stage", [2, 3])
def test_each_is_sent_as_bf16(mesh, stage, monkeypatch):
    model = nn.Sequential(nn.Linear(1, 4, bias=False))
    FsdpShards(stage, mesh, reduces_once=True, reduce_dtype="bf16").make(model)
    model(torch.tensor([[1 + 2.0**-9]])).sum().backward()
    assert next(model.parameters()).grad.full_tensor().unique() == 1


def test_a_torch_that_takes_no_way_to_send_of_ours_is_refused(mesh, monkeypatch):
    class Without(nn.Module):
        pass

    monkeypatch.setattr(fsdp2, "FSDPModule", Without)
    with raises(DependencyError, code="torch.version_unsupported", field="torch"):
        send_in_bf16(Without())
