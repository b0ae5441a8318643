"""Whole messages, as a user reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.errors import TrimtabError
from trimtab.distributed import backend_selection
from trimtab.distributed.fsdp2 import require_step_of_shards
from trimtab.distributed.launched_rank import rank_lost, ranks_failed


def test_another_rank_failed():
    assert str(ranks_failed({1: "ValueError: no data"})) == (
        "Rank 1 failed (ValueError: no data). Fix this error; the other ranks stopped because of it."
    )


def test_another_rank_was_lost():
    assert str(rank_lost(3, "no heartbeat for 60 s")) == (
        "Rank 3 was lost (no heartbeat for 60 s). "
        "Check the log of rank 3 and its machine: the process was stopped or killed, or the machine failed."
    )


def test_a_plan_for_another_number_of_ranks():
    with pytest.raises(TrimtabError) as refused:
        backend_selection.backend_of(nn.Linear(2, 1), trimtab.Plan.fixed(8, num_ranks=4, zero_stage=1), {})
    assert str(refused.value).startswith("The plan is for 4 ranks, but the job has one process. Start that number of ")


def test_a_fused_optimizer_of_shards():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, fused=True)
    with pytest.raises(TrimtabError) as refused:
        require_step_of_shards(optimizer)
    assert str(refused.value) == (
        "torch has no fused step of SGD for parameters that are sharded by ZeRO stage 2 or 3. "
        "Build the optimizer with fused=False and use a plan with fused_optimizer=False, or use ZeRO stage 0 or 1."
    )
