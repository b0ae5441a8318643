"""Plans of several ranks, where what they need is not to be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from raising import raises
from torch import nn
from torch.distributed import distributed_c10d as c10d

import trimtab
from trimtab.core.errors import InfeasibleError, UsageError, ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.parallelism import StepShape
from trimtab.core.plan import Plan
from trimtab.core.progress import silent
from trimtab.distributed import backend_selection, plan_on_ranks, zero_stage_inputs
from trimtab.losses import Summed
from trimtab.planner.plan_choice import choose
from trimtab.profiling.communication_profile import step_shape


def test_a_link_that_cannot_be_timed_leaves_the_sending_as_it_is(monkeypatch):
    def fails(device):
        raise ValueGivenError("link.points", got="noise", expected="a line")

    monkeypatch.setattr(plan_on_ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(plan_on_ranks, "from_first", lambda make: make())
    monkeypatch.setattr(plan_on_ranks, "calibrate", fails)
    shape = StepShape(0.1, 0.2, 0.01, (4,), (1.0,))
    made = plan_on_ranks.BroadcastPlan(trimtab.Plan.fixed(8), shape)
    plan = plan_on_ranks.plan_together(lambda: made, torch.device("cpu"))
    assert (plan.reduce_dtype.value, plan.bucket_bytes.value) == ("fp32", None)
    assert "could not be measured (link.points: got noise" in plan.reduce_dtype.reason


# Which stage: where it cannot be chosen, ranks hold the model as before, and the plan says why.


def loop_of(loss_fn=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, loss_fn or (lambda model, batch: model(batch).square().mean()), torch.ones(8, 16)


@pytest.fixture(scope="module")
def profile():
    return trimtab.profile(*loop_of(), budget=Budget(2**30), num_blocks=3)


@pytest.fixture
def of_two(monkeypatch):
    """Have a job of two ranks, as the first of them sees it."""
    monkeypatch.setattr(zero_stage_inputs.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(plan_on_ranks, "from_first", lambda make: make())


def chosen(profile, loop, **how) -> Plan:
    share = zero_stage_inputs.share_of(profile, loop, silent, **how)
    made = (
        plan_on_ranks.BroadcastPlan(zero_stage_inputs.of_replicas(profile, share), None, share)
        if isinstance(share, str)
        else share
    )
    return plan_on_ranks.plan_together(lambda: made, torch.device("cpu"))


def refuses(*args, **kwargs):
    raise AssertionError("traced")


def test_ample_memory_is_not_asked_about(profile, of_two, monkeypatch):
    monkeypatch.setattr(zero_stage_inputs, "trace_here", refuses)
    plan = chosen(replace(profile, budget=Budget()), loop_of())
    assert (plan.zero_stage.value, plan.num_ranks) == (0, 2)
    assert plan.zero_stage.code == "ranks.replicated"


def test_memory_that_is_weighed_is(profile, of_two):
    weighed = replace(profile, budget=Budget(), objective=Objective(1.0, 1.0))
    assert isinstance(zero_stage_inputs.share_of(weighed, loop_of(), silent), zero_stage_inputs.StageMeasurements)


def test_seconds_that_are_limited_are_those_of_a_window_with_what_is_sent(profile, of_two):
    limited = replace(profile, budget=Budget(time=1e3))
    assert isinstance(zero_stage_inputs.share_of(limited, loop_of(), silent), zero_stage_inputs.StageMeasurements)


def test_joules_that_are_limited_are_held_against_one_process(profile, of_two, monkeypatch):
    monkeypatch.setattr(zero_stage_inputs, "trace_here", refuses)
    limited = replace(profile, budget=Budget(2**30, energy=50.0))
    assert zero_stage_inputs.share_of(limited, loop_of(), silent) == zero_stage_inputs.NO_JOULES


def test_parameters_that_are_not_trained_are_gathered_and_not_reduced(profile):
    model, *_ = loop_of()
    model[0].requires_grad_(False)
    shape = step_shape(model, profile, choose(profile, Objective(), Budget()))
    assert sum(shape.gathered_bytes) == 4 * sum(p.numel() for p in model.parameters())
    assert sum(shape.block_bytes) == 4 * sum(p.numel() for p in model[2].parameters())


def test_a_plan_that_adapts_is_for_replicas(profile, of_two, monkeypatch):
    monkeypatch.setattr(zero_stage_inputs, "trace_here", refuses)
    plan = chosen(profile, loop_of(), adapts=True)
    assert plan.zero_stage.value == 0
    assert plan.zero_stage.reason.endswith(f"; {zero_stage_inputs.ADAPTS}")


def test_a_step_that_cannot_be_traced_is_for_replicas(profile, of_two):
    def counts(model, batch):
        return Summed(model(batch).square().sum(), int((batch > 0).sum()))

    plan = chosen(profile, loop_of(counts))
    assert plan.zero_stage.value == 0
    assert "memory is unknown" in plan.zero_stage.reason


def test_a_share_of_too_few_rows_is_for_replicas(profile, of_two):
    model, optimizer, loss_fn, batch = loop_of()
    plan = chosen(profile, (model, optimizer, loss_fn, batch[:2]))
    assert plan.zero_stage.value == 0
    assert "memory is unknown" in plan.zero_stage.reason
    assert "2 samples" in plan.zero_stage.reason


def test_a_torch_without_what_traces_need_is_for_replicas(profile, of_two, monkeypatch):
    monkeypatch.delattr(c10d, "_World")
    plan = chosen(profile, loop_of())
    assert plan.zero_stage.value == 0
    assert "memory is unknown" in plan.zero_stage.reason
    assert torch.__version__ in plan.zero_stage.reason


def test_a_link_that_cannot_be_timed_is_for_replicas(profile, of_two, monkeypatch):
    def fails(device):
        raise ValueGivenError("link.points", got="noise", expected="a line")

    monkeypatch.setattr(plan_on_ranks, "calibrate", fails)
    plan = chosen(profile, loop_of())
    assert plan.zero_stage.value == 0
    for choice in (plan.zero_stage, plan.reduce_dtype):
        assert "could not be measured (link.points: got noise" in choice.reason


def test_replicas_that_do_not_fit_say_why_there_is_no_other_stage(profile):
    limited, said = replace(profile, budget=Budget(100)), []
    for why in ("it adapts", ""):
        with pytest.raises(InfeasibleError) as refused:
            zero_stage_inputs.of_replicas(limited, why)
        said.append(refused.value)
    told, plain = said
    assert (told.code, told.field, told.hint) == (plain.code, plain.field, plain.hint)
    assert "it adapts" in str(told)
    assert "whole model" not in str(plain)


def test_a_stage_in_one_process_is_no_stage():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8, zero_stage=1)) as run:
        assert run.model is model
        run.train_step(run.window(torch.ones(8, 4)), lambda model, batch: model(batch).square().mean())
        assert run.applied_steps == 1


def test_deepspeed_leaves_no_choice_of_what_a_step_that_is_no_number_does(monkeypatch):
    monkeypatch.setattr(backend_selection, "has_peers", lambda: True)
    monkeypatch.setattr(backend_selection.dist, "get_world_size", lambda: 2)
    plan = trimtab.Plan.fixed(8, zero_stage=1, engine="deepspeed", num_ranks=2)
    with raises(UsageError, code="deepspeed.nonfinite", field="nonfinite"):
        backend_selection.backend_of(nn.Linear(4, 1), plan, {"nonfinite": "skip"})
