"""Plans of several ranks: which are rehearsed, and which is taken where what they need is not to be had."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from raising import raises
from small_loops import sgd, square_loss
from torch import nn
from torch.distributed import distributed_c10d as c10d

import trimtab
from trimtab.core.errors import InfeasibleError, UsageError, ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.parallelism import StepShape
from trimtab.core.progress import silent
from trimtab.distributed import backend_selection, plan_on_ranks
from trimtab.distributed.plan_on_ranks import StageMeasurements
from trimtab.losses import Summed
from trimtab.planner.multi_rank_plan import MOST_REHEARSALS, DryRunResult, by_default, way_of
from trimtab.planner.plan_choice import choose
from trimtab.plans.plan import Plan
from trimtab.profiling.communication_profile import step_shape

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))
from simulated_machine import MIB
from test_rank_stages import ACCELERATOR, RANKS, calibration, profile_of, shape, traces_of

pytestmark = pytest.mark.slow


def finds_no_line(device):
    raise ValueGivenError("link.points", got="noise", expected="a line")


def test_a_link_that_cannot_be_timed_leaves_the_sending_as_it_is(monkeypatch):
    monkeypatch.setattr(plan_on_ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(plan_on_ranks, "from_first", lambda make: make())
    monkeypatch.setattr(plan_on_ranks, "calibrate", finds_no_line)
    shape = StepShape(0.1, 0.2, 0.01, (4,), (1.0,))
    made = plan_on_ranks.BroadcastPlan(trimtab.Plan.fixed(8), shape)
    plan = plan_on_ranks.plan_together(lambda: made, torch.device("cpu"))
    assert (plan.reduce_dtype.value, plan.bucket_bytes.value) == ("fp32", None)
    assert "could not be measured (link.points: got noise" in plan.reduce_dtype.reason


# Which stage: where it cannot be chosen, ranks hold the model as before, and the plan says why.


def loop_of(loss_fn=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, sgd(model), loss_fn or square_loss, torch.ones(8, 16)


@pytest.fixture(scope="module")
def profile():
    return trimtab.profile(*loop_of(), budget=Budget(2**30), num_blocks=3)


@pytest.fixture
def of_two(monkeypatch):
    """Have a job of two ranks, as the first of them sees it."""
    monkeypatch.setattr(plan_on_ranks.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(plan_on_ranks, "from_first", lambda make: make())


def chosen(profile, loop, **how) -> Plan:
    share = plan_on_ranks.share_of(profile, loop, silent, **how)
    made = (
        plan_on_ranks.BroadcastPlan(plan_on_ranks.of_replicas(profile, share), None, share)
        if isinstance(share, str)
        else share
    )
    return plan_on_ranks.plan_together(lambda: made, torch.device("cpu"))


def refuses(*args, **kwargs):
    raise AssertionError("traced")


def test_ample_memory_is_not_asked_about(profile, of_two, monkeypatch):
    monkeypatch.setattr(plan_on_ranks, "trace_here", refuses)
    plan = chosen(replace(profile, budget=Budget()), loop_of())
    assert (plan.zero_stage.value, plan.num_ranks) == (0, 2)
    assert plan.zero_stage.code == "ranks.replicated"


def test_limits_of_memory_time_and_energy_choose_what_is_traced(profile, of_two, monkeypatch):
    weighed = replace(profile, budget=Budget(), objective=Objective(1.0, 1.0))
    assert isinstance(plan_on_ranks.share_of(weighed, loop_of(), silent), plan_on_ranks.StageMeasurements)
    limited = replace(profile, budget=Budget(time=1e3))
    assert isinstance(plan_on_ranks.share_of(limited, loop_of(), silent), plan_on_ranks.StageMeasurements)
    monkeypatch.setattr(plan_on_ranks, "trace_here", refuses)
    limited = replace(profile, budget=Budget(2**30, energy=50.0))
    assert plan_on_ranks.share_of(limited, loop_of(), silent) == plan_on_ranks.NO_JOULES


def test_parameters_that_are_not_trained_are_gathered_and_not_reduced(profile):
    model, *_ = loop_of()
    model[0].requires_grad_(False)
    shape = step_shape(model, profile, choose(profile, Objective(), Budget()))
    assert sum(shape.gathered_bytes) == 4 * sum(p.numel() for p in model.parameters())
    assert sum(shape.block_bytes) == 4 * sum(p.numel() for p in model[2].parameters())


def test_a_plan_that_adapts_is_for_replicas(profile, of_two, monkeypatch):
    monkeypatch.setattr(plan_on_ranks, "trace_here", refuses)
    plan = chosen(profile, loop_of(), adapts=True)
    assert plan.zero_stage.value == 0
    assert plan.zero_stage.reason.endswith(f"; {plan_on_ranks.ADAPTS}")


def test_ranks_hold_replicas_where_memory_is_unknown(profile, of_two, monkeypatch):
    def counts(model, batch):
        return Summed(model(batch).square().sum(), int((batch > 0).sum()))

    model, optimizer, loss_fn, batch = loop_of()
    cases = [("", loop_of(counts)), ("2 samples", (model, optimizer, loss_fn, batch[:2])), (torch.__version__, None)]
    for reason, loop in cases:
        if loop is None:
            monkeypatch.delattr(c10d, "_World")
        plan = chosen(profile, loop or loop_of())
        assert plan.zero_stage.value == 0
        assert "memory is unknown" in plan.zero_stage.reason
        assert reason in plan.zero_stage.reason


def test_a_link_that_cannot_be_timed_is_for_replicas(profile, of_two, monkeypatch):
    monkeypatch.setattr(plan_on_ranks, "calibrate", finds_no_line)
    plan = chosen(profile, loop_of())
    assert plan.zero_stage.value == 0
    for choice in (plan.zero_stage, plan.reduce_dtype):
        assert "could not be measured (link.points: got noise" in choice.reason


def test_replicas_that_do_not_fit_say_why_there_is_no_other_stage(profile):
    limited, said = replace(profile, budget=Budget(100)), []
    for why in ("it adapts", ""):
        with pytest.raises(InfeasibleError) as refused:
            plan_on_ranks.of_replicas(limited, why)
        said.append(refused.value)
    told, plain = said
    assert (told.code, told.field, told.hint) == (plain.code, plain.field, plain.hint)
    assert "it adapts" in str(told)
    assert "whole model" not in str(plain)


def test_a_stage_in_one_process_is_no_stage():
    model = nn.Linear(4, 1)
    with trimtab.start(model, sgd(model), trimtab.Plan.fixed(8, zero_stage=1)) as run:
        assert run.model is model
        run.train_step(run.window(torch.ones(8, 4)), square_loss)
        assert run.applied_steps == 1


def test_deepspeed_leaves_no_choice_of_what_a_step_that_is_no_number_does(monkeypatch):
    monkeypatch.setattr(backend_selection, "has_peers", lambda: True)
    monkeypatch.setattr(backend_selection.dist, "get_world_size", lambda: 2)
    plan = trimtab.Plan.fixed(8, zero_stage=1, engine="deepspeed", num_ranks=2)
    with raises(UsageError, code="deepspeed.nonfinite", field="nonfinite"):
        backend_selection.backend_of(nn.Linear(4, 1), plan, {"nonfinite": "skip"})


class Planted:
    """Rehearsals whose outcomes are given: each plan holds so many MiB more than told, or is refused."""

    def __init__(self, *, more=lambda plan: 0, refused=lambda plan: "", refusal: str = "") -> None:
        self.more, self.refused, self.why, self.seen = more, refused, refusal, []

    def refusal(self) -> str:
        return self.why

    def of(self, plan: Plan, *, counts_memory: bool) -> DryRunResult:
        assert counts_memory
        self.seen.append(plan)
        if text := self.refused(plan):
            return DryRunResult(plan, refusal=text, took_s=1.0)
        peaks = (plan.predicted.peak_bytes + self.more(plan) * MIB,) * 5
        return DryRunResult(plan, (plan.predicted.step_s,) * 5, peaks, 1.0, took_s=1.0)


@pytest.fixture
def planned(monkeypatch):
    """Return a job's plan under a limit in MiB, over a link."""
    monkeypatch.setattr(plan_on_ranks.dist, "get_world_size", lambda: RANKS)
    monkeypatch.setattr(plan_on_ranks, "from_first", lambda make: make())

    def plan(rehearsal: Planted, memory: int, *link: float) -> Plan:
        monkeypatch.setattr(plan_on_ranks, "calibrate", lambda device: calibration(*link))
        profile = profile_of(memory=memory, device=ACCELERATOR)
        share = StageMeasurements(profile, traces_of(profile), shape)
        return plan_on_ranks.plan_together(lambda: share, None, lambda: rehearsal)

    return plan


def test_where_no_rehearsal_did_fit_the_best_that_is_told_to_is_taken_and_says_so(planned):
    rehearsal = Planted(refused=lambda plan: "" if plan.micro_batch.value <= 2 else "memory ran out")
    plan = planned(rehearsal, 751)
    assert len(rehearsal.seen) == MOST_REHEARSALS
    assert plan.measured is None
    assert plan.planning_s >= MOST_REHEARSALS
    assert f"none of the first {MOST_REHEARSALS} plans" in plan.zero_stage.reason
    assert plan.predicted.peak_bytes <= 751 * MIB


def test_the_best_plan_that_fitted_in_a_dry_run_is_taken(planned):
    with pytest.raises(InfeasibleError):
        planned(Planted(more=lambda plan: 10**4), 751)
    rehearsal = Planted()
    plan = planned(rehearsal, 751)
    assert len(rehearsal.seen) == 1
    assert plan.measured.peak_bytes == plan.predicted.peak_bytes


SLOW = 2e6


def test_where_nothing_can_be_rehearsed_gradients_are_sent_as_by_default(planned):
    told = planned(Planted(), 716, SLOW)
    assert told.reduce_dtype.value == "bf16"
    plan = planned(Planted(refusal="no copies"), 716, SLOW)
    assert (plan.reduce_dtype.value, plan.bucket_bytes.value) == ("fp32", None)
    assert by_default(plan) is None
    assert plan.predicted.step_s > told.predicted.step_s
    assert plan.measured is None
    assert plan.reduce_dtype.code == "dry_run.not_run"
    assert "no copies" in plan.reduce_dtype.reason
    assert "no copies" in plan.zero_stage.reason


def test_what_is_refused_as_it_is_to_be_sent_is_rehearsed_as_it_is_by_default(planned):
    rehearsal = Planted(refused=lambda plan: "no bf16 here" if plan.reduce_dtype.value == "bf16" else "")
    plan = planned(rehearsal, 716, SLOW)
    one, other, *rest = rehearsal.seen
    assert not rest
    assert (one.reduce_dtype.value, other.reduce_dtype.value) == ("bf16", "fp32")
    assert replace(other, reduce_dtype=one.reduce_dtype, bucket_bytes=one.bucket_bytes) == one
    assert way_of(plan) == way_of(one)
    assert plan.reduce_dtype.value == "fp32"
    assert plan.reduce_dtype.code == "dry_run.not_run"
    assert "no bf16 here" in plan.reduce_dtype.reason
    assert plan.measured is not None
    assert plan.planning_s >= 2


def test_a_way_that_is_refused_however_it_is_sent_is_left(planned):
    first = way_of(planned(Planted(), 716, SLOW))
    rehearsal = Planted(refused=lambda plan: "no such way" if way_of(plan) == first else "")
    assert way_of(planned(rehearsal, 716, SLOW)) != first
    assert [plan.reduce_dtype.value for plan in rehearsal.seen[:2]] == ["bf16", "fp32"]
