"""Plans of several ranks, where what they need is not to be had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.errors import UsageError, ValueGivenError
from trimtab.core.parallelism import StepShape
from trimtab.distributed import backends, planning


def test_a_link_that_cannot_be_timed_leaves_the_sending_as_it_is(monkeypatch):
    def fails(device):
        raise ValueGivenError("link.points", given="noise", expected="a line")

    monkeypatch.setattr(planning.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(planning, "from_first", lambda make: make())
    monkeypatch.setattr(planning, "calibrate", fails)
    shape = StepShape(0.1, 0.2, 0.01, (4,), (1.0,))
    made = planning.Made(trimtab.Plan.fixed(8), shape)
    plan = planning.plan_together(lambda: made, torch.device("cpu"))
    assert (plan.reduce_dtype.value, plan.bucket_bytes.value) == ("fp32", None)
    assert "could not be timed" in plan.reduce_dtype.reason


def test_a_stage_in_one_process_is_no_stage():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8, zero_stage=1)) as run:
        assert run.model is model
        run.train_step(run.window(torch.ones(8, 4)), lambda model, batch: model(batch).square().mean())
        assert run.applied_steps == 1


def test_deepspeed_leaves_no_choice_of_what_a_step_that_is_no_number_does(monkeypatch):
    monkeypatch.setattr(backends, "has_peers", lambda: True)
    monkeypatch.setattr(backends.dist, "get_world_size", lambda: 2)
    plan = trimtab.Plan.fixed(8, zero_stage=1, engine="deepspeed", num_ranks=2)
    with pytest.raises(UsageError, match="skip with DeepSpeed"):
        backends.backend_of(nn.Linear(4, 1), plan, {"nonfinite": "skip"})
