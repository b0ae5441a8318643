"""A job of a scaling table in one process: each loop is timed as it would run by itself."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from dataclasses import replace

import pytest
from raising import raises
from tiny_task import task

from trimtab.core.choice import MeasuredCost
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.progress import silent
from trimtab.core.serialization import read_json, to_json
from trimtab.distributed.plan_on_ranks import BroadcastPlan
from trimtab.experiments.scaling import scaling_job as scale_bench
from trimtab.experiments.scaling.scale import ScaleSettings, scale
from trimtab.experiments.scaling.scaling_job import (
    JobPlan,
    JobSettings,
    fit_plan_to_ranks,
    predicted_bytes,
    refuse_other_maths,
    run_job,
)
from trimtab.plans.plan import Plan
from trimtab.state import process_state

SHORT = JobSettings(blocks=2, block_s=0.01)


@pytest.fixture
def folder(tmp_path):
    plan = Plan.fixed(task.batch_size, allocator="retain")
    (tmp_path / f"plan-{task.batch_size}.json").write_text(to_json(BroadcastPlan(plan)))
    return tmp_path


@pytest.mark.skipif(not process_state.can_retain(), reason="this allocator cannot be told to retain")
def test_the_plain_loop_is_not_timed_under_what_the_plan_has_the_process_do(folder):
    models, modes = [], defaultdict(list)

    def make_model():
        models.append(task.make_model())
        return models[-1]

    def loss_fn(model, batch):
        modes[next(i for i, each in enumerate(models) if each is model)].append(process_state.allocator_mode())
        return task.loss_fn(model, batch)

    run_job(replace(task, make_model=make_model, loss_fn=loss_fn), 0, folder, SHORT, silent)
    baseline, control, plan, counted, counted_plan = (modes[i] for i in sorted(modes))
    assert set(baseline) == set(control) == set(counted) == {"keep"}
    assert plan[-1] == counted_plan[-1] == "retain"
    assert process_state.allocator_mode() == "keep"


def test_idle_loops_hold_no_gradients_and_a_loop_ends_with_its_last_block(folder):
    """What is held on top of the loop that runs is weights and state, and at the end nothing."""
    models, alive, idle = [], [], []

    def make_model():
        made = task.make_model()
        models.append(weakref.ref(made))
        return made

    def loss_fn(model, batch):
        there = [each for each in (ref() for ref in models) if each is not None]
        alive.append(len(there))
        others = [each for each in there if each is not model]
        idle.append(any(p.grad is not None for each in others for p in each.parameters()))
        return task.loss_fn(model, batch)

    gc.collect()
    settings = replace(SHORT, adapts_batch_size=True)
    found = run_job(replace(task, make_model=make_model, loss_fn=loss_fn), 0, folder, settings, silent)
    assert max(alive) == 4
    assert not any(idle)
    first = alive.index(4)
    assert {3, 2, 1} <= set(alive[first:])  # of the last lap
    assert alive[-1] == 1  # what is counted apart
    peaks = {arm.recipe: arm.peak_bytes for arm in found.arms}
    assert (peaks["self"], peaks["plan_batch"]) == (None, None)
    assert peaks["baseline"] > 0
    assert peaks["plan"] > 0


def test_what_is_counted_apart_is_gone_before_the_next_count(folder, monkeypatch):
    """Loops refer to themselves: what nobody collects would be in the next one's count, on CUDA."""
    models, alive = [], []

    def make_model():
        made = task.make_model()
        models.append(weakref.ref(made))
        return made

    def counts(*_args):
        alive.append(sum(ref() is not None for ref in models))
        return 1

    monkeypatch.setattr(scale_bench, "held_at_most", counts)
    gc.collect()
    gc.disable()
    try:
        run_job(replace(task, make_model=make_model), 0, folder, SHORT, silent)
    finally:
        gc.enable()
    assert alive == [1, 1]


@pytest.mark.usefixtures("brief_trials")
def test_where_no_plan_meets_the_limit_the_plain_loop_is_timed_all_the_same(tmp_path):
    found = run_job(task, 0, tmp_path, replace(SHORT, budget=Budget("1KiB")), silent)
    assert [arm.recipe for arm in found.arms] == ["baseline", "self"]
    (refused,) = found.refused
    assert (refused.recipe, refused.ranks) == ("plan", 1)
    assert "over the budget" in refused.why
    kept = read_json(JobPlan, tmp_path / f"plan-{task.batch_size}-1.json")
    assert (kept.plan, kept.refusal) == (None, refused.why)  # which the next round has too


def test_a_given_plan_runs_on_each_number_of_ranks_with_its_settings():
    plan = replace(Plan.fixed(16, 8, num_ranks=2, zero_stage=2), predicted=MeasuredCost(0.1, 1000))
    assert fit_plan_to_ranks(plan, 16, 2) is plan
    one, four, wide = (fit_plan_to_ranks(plan, rows, ranks) for rows, ranks in ((16, 1), (16, 4), (32, 2)))
    assert (one.num_ranks, one.zero_stage.value, one.micro_batch.value) == (1, None, 8)
    assert (four.num_ranks, four.zero_stage.value, four.micro_batch.value) == (4, 2, 8)
    assert (wide.batch_size, wide.micro_batch.value, wide.num_micro_batches) == (32, 8, 4)
    assert {each.predicted for each in (one, four, wide)} == {None}
    assert fit_plan_to_ranks(Plan.fixed(16), 32, 1).num_micro_batches == 1  # a batch that was whole stays so
    assert fit_plan_to_ranks(Plan.fixed(16), 32, 2).zero_stage.value == 0
    with raises(ValueGivenError, code="plan.not_equivalent", field="--plan"):
        refuse_other_maths(Plan.fixed(16, learning_rate_scale=2.0))
    plan = replace(Plan.fixed(16, num_ranks=2, zero_stage=2), predicted=MeasuredCost(0.1, 1000))
    assert predicted_bytes(plan) == 1000
    assert predicted_bytes(replace(plan, baseline=MeasuredCost(0.1, 1000))) is None
    assert predicted_bytes(replace(Plan.fixed(16), predicted=MeasuredCost(0.1, 7), baseline=MeasuredCost(0.1, 9))) == 7


def test_one_rank_has_every_recipe_and_no_link(folder):
    found = run_job(task, 3, folder, replace(SHORT, adapts_batch_size=True), silent)
    assert [arm.recipe for arm in found.arms] == ["baseline", "self", "plan", "plan_batch"]
    assert (found.ranks, found.round, found.link) == (1, 3, None)
    assert all(arm.alone is None for arm in found.arms)
    assert {arm.window_samples for arm in found.arms[:3]} == {float(task.batch_size)}


def test_a_task_with_a_step_of_its_own_is_refused_before_a_job_is_launched(tmp_path):
    own = replace(task, step=lambda model, optimizer, batch: None)
    launched = []
    with raises(ValueGivenError, code="step.several_ranks", field="task.step"):
        scale(own, tmp_path / "table", ScaleSettings((1, 2)), lambda *job: launched.append(job), silent)
    assert not launched
