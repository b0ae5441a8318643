"""Blocks computed again on a device that is not here: their bytes and operators are those of a step traced so."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from raising import raises
from small_loops import sgd, square_loss
from torch import nn

import trimtab
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.hardware import absent_device
from trimtab.core.recompute_schedule import EVERY_BLOCK, schedule_of
from trimtab.core.serialization import from_json, to_json
from trimtab.measure import fake_tensors
from trimtab.measure.fake_tensors import FakeCudaMode
from trimtab.measure.memory_trace import trace_peaks
from trimtab.planner.cost_model import seconds_of, step_seconds
from trimtab.planner.recompute_candidates import peak_bytes
from trimtab.planner.recompute_cost import keep_all, predict
from trimtab.planner.target_device_candidates import recorded_blocks, recorded_traces, traced_for, with_blocks
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Profile, TracedBlocks
from trimtab.profiling.candidate_traces import HERE, two_sizes
from trimtab.profiling.target_device import profile_elsewhere, trace_blocks
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.techniques.activation_checkpointing import use_schedule
from trimtab.techniques.mixed_precision import autocast

L4 = absent_device("L4")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]
SHAPE = GPTShape(vocab_size=256, context=64, num_layers=5, num_heads=2, width=64)
ROWS = 16
SCHEDULES = [EVERY_BLOCK, "(0-1) (2-3) 4", "~0-4", "0 (1) ~2 (3 (4))", "0-4"]


def loop():
    torch.manual_seed(0)
    model = GPT(SHAPE).train()
    batch = (torch.randint(0, 256, (ROWS, 65)),)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), next_token_loss, batch


def normalised():
    """Return a loop whose batch cannot be split."""
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())

    model = nn.Sequential(*(block() for _ in range(6)), nn.Linear(64, 8)).train()
    batch = (torch.randn(4096, 64),)
    return model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b[0]).square().mean(), batch


@functools.cache
def traced(precision):
    found = trace_blocks(*loop(), Candidate(ROWS, precision=precision))
    assert isinstance(found, TracedBlocks)
    return found


@functools.cache
def traced_step(precision, text):
    """Return a step's peak and work for any rows, its blocks computed again from the start."""
    model, optimizer, loss_fn, batch = loop()
    sizes, batches = two_sizes(batch)
    schedule, names = schedule_of(text, SHAPE.num_layers), traced(precision).blocks
    how = {"autocasts": [functools.partial(autocast, precision, HERE)]}
    with FakeCudaMode():
        (found,) = trace_peaks(
            model, optimizer, loss_fn, batches, sizes, prepare=lambda m: use_schedule(m, names, schedule), **how
        )
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("text", SCHEDULES)
def test_peaks_are_those_of_a_step_that_is_traced_so(text, precision):
    found, step = traced(precision), traced_step(precision, text)
    for (model, expected), rows in itertools.product(
        ((found.whole, step.whole), (found.sliced, step.sliced)), (ROWS, 12, 32)
    ):
        chain = model.at(rows)
        schedule = (*schedule_of(text, SHAPE.num_layers), keep_all(SHAPE.num_layers + 1)[-1])
        told = max(chain.held_bytes + predict(chain.stages, schedule).peak_bytes, step.step.peak_bytes(rows))
        assert told == pytest.approx(expected.peak_bytes(rows), rel=0.03)


def test_without_torchs_own_engine_blocks_are_planned_whole_or_not_at_all(monkeypatch):
    before = trimtab.plan(*loop(), device=L4)
    monkeypatch.setattr(fake_tensors, "_ENGINE", None)
    assert trimtab.plan(*loop(), device=L4).predicted == before.predicted
    assert "different number of tensors" in trace_blocks(*loop(), Candidate(ROWS))


def planned(make, **given):
    known = {"reference": trimtab.Reference(), "objective": trimtab.Objective(), "budget": trimtab.Budget()}
    return profile_elsewhere(*make(), L4, **(known | given))


@functools.cache
def of_both():
    """Return the profile of a loop for time and memory."""
    return planned(loop, objective=trimtab.Objective(1.0, 1.0))


@pytest.mark.parametrize("text", [EVERY_BLOCK, "~0-4", "(0-1) (2-3) 4"])
def test_seconds_are_those_of_what_runs_again(text):
    """To 15%: torch computes no more of a block than its backward needs, and stops before its last operators."""
    profile = of_both()
    (found,) = {each.candidate.precision: each for each in profile.recomputables}.values()
    precision = found.candidate.precision
    traced_as = {"tf32": "fp32", "fp16": "bf16"}.get(precision, precision)
    again, kept = (step_seconds(traced_step(traced_as, each).work, L4, precision, ROWS, 1) for each in (text, "0-4"))
    schedule = (*schedule_of(text, SHAPE.num_layers), keep_all(SHAPE.num_layers + 1)[-1])
    assert predict(found.whole.at(ROWS).stages, schedule).recompute_s == pytest.approx(again - kept, rel=0.15)


def test_no_micro_batch_is_told_less_than_its_operators_take():
    profile = of_both()
    for found in profile.recomputables:
        traced_as = traced({"tf32": "fp32", "fp16": "bf16"}.get(found.candidate.precision, found.candidate.precision))
        for rows in (1, 2, ROWS // 2, ROWS):
            stages = found.whole.at(rows).stages
            for stage, operations in zip(stages, traced_as.forwards, strict=False):
                least_s = seconds_of(operations, L4, found.candidate.precision, rows)
                assert least_s * (1 - 1e-9) <= stage.forward_s
                assert rows not in (1, ROWS) or stage.forward_s == pytest.approx(least_s)


def replaced():
    model, *others = normalised()
    model[2].forward = functools.partial(type(model[2]).forward, model[2])
    return model, *others


def over_its_input():
    blocks = (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)) for _ in range(3))
    model = nn.Sequential(nn.Linear(64, 64), *blocks)
    return model, torch.optim.AdamW(model.parameters()), *normalised()[2:]


@pytest.mark.parametrize(("make", "said"), [(replaced, "was replaced"), (over_its_input, "argument in place")])
def test_what_no_run_could_compute_again_no_plan_does(make, said):
    profile = planned(make, objective=trimtab.Objective(1.0, 1.0))
    assert profile.recomputables
    assert all(said in each.refusal for each in profile.recomputables)


def test_blocks_with_hooks_of_their_own_are_in_no_segment_of_several():
    def make():
        model, *others = normalised()
        model[1].register_forward_hook(lambda *_: None)
        return model, *others

    for found in planned(make, objective=trimtab.Objective(1.0, 1.0)).recomputables:
        assert found.refusal == ""
        assert not any(stage.is_linked for stage in found.whole.many.stages)
    linked = planned(normalised, objective=trimtab.Objective(1.0, 1.0)).recomputables
    assert all(any(stage.is_linked for stage in found.whole.many.stages) for found in linked)


def test_a_limit_is_met_by_computing_again_where_the_batch_cannot_be_split():
    model, optimizer, loss_fn, batch = normalised()
    free = trimtab.plan(model, optimizer, loss_fn, batch, device=L4)
    assert not free.recompute.changed
    limit = int(0.6 * free.predicted.peak_bytes)
    plan = trimtab.plan(model, optimizer, loss_fn, batch, device=L4, budget=trimtab.Budget(memory=limit))
    assert plan.recompute.changed
    assert plan.recompute.code in ("recompute.faster", "recompute.needed")
    assert plan.micro_batch.value == 4096
    assert plan.predicted.peak_bytes <= limit
    assert plan.predicted.step_s > free.predicted.step_s
    assert plan.recompute_blocks == tuple(str(index) for index in range(6))
    assert from_json(Plan, to_json(plan)) == plan
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        trimtab.plan(model, optimizer, loss_fn, batch, device=L4, budget=trimtab.Budget(memory=limit // 4))


def test_blocks_may_be_named():
    given = {"objective": trimtab.Objective(1.0, 1.0), "named_blocks": ("0", "3.0")}
    assert {each.blocks for each in planned(normalised, **given).recomputables} == {("0", "3.0")}
    with raises(ValueGivenError, code="blocks.unknown_module", field="blocks"):
        trimtab.plan(*normalised(), device=L4, blocks=["9"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    loop_of = model, sgd(model), lambda m, b: m(m(b)).sum(), torch.randn(8, 4)
    with raises(ValueGivenError, code="blocks.not_run_once", field="blocks"):
        trimtab.plan(*loop_of, device=L4, blocks=["0"])


def test_a_recorded_profile_says_what_a_plan_of_the_loop_says():
    budget = trimtab.Budget(memory="6MiB")
    live = planned(normalised, budget=budget)
    assert live.recomputables
    kept = from_json(Profile, to_json(trimtab.profile(*normalised(), num_blocks=3, traces=True)))
    there = replace(replace(kept, over_time_budget=True).for_device(L4), budget=budget)
    again = with_blocks(traced_for(there, recorded_traces(kept)), recorded_blocks(kept))
    assert again.recomputables == live.recomputables
    assert any(peak_bytes(again, each.candidate) for each in again.recomputables)


def test_what_cannot_be_traced_in_blocks_is_planned_without():
    model = nn.Linear(8, 8)
    loop_of = model, sgd(model), square_loss, torch.randn(64, 8)
    plan = trimtab.plan(*loop_of, device=L4, objective=trimtab.Objective(1.0, 1.0))
    assert not plan.recompute.changed
    assert "no blocks that run once in a forward" in plan.recompute.reason
