"""A job of a scaling table in one process: each loop is timed as it would run by itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from tiny_task import task

from trimtab.core.codec import to_json
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.progress import silent
from trimtab.distributed.planning import Made
from trimtab.experiments.scale import ScaleSettings, scale
from trimtab.experiments.scale_job import JobSettings, run_job
from trimtab.measure import allocator

SHORT = JobSettings(blocks=2, block_s=0.01)


@pytest.fixture
def folder(tmp_path):
    plan = Plan.fixed(task.batch_rows, allocator="retain")
    (tmp_path / f"plan-{task.batch_rows}.json").write_text(to_json(Made(plan)))
    return tmp_path


@pytest.mark.skipif(not allocator.can_retain(), reason="this allocator cannot be told to retain")
def test_the_plain_loop_is_not_timed_under_what_the_plan_has_the_process_do(folder):
    models, modes = [], defaultdict(list)

    def make_model():
        models.append(task.make_model())
        return models[-1]

    def loss_fn(model, batch):
        modes[next(i for i, each in enumerate(models) if each is model)].append(allocator.mode())
        return task.loss_fn(model, batch)

    run_job(replace(task, make_model=make_model, loss_fn=loss_fn), 0, folder, SHORT, silent)
    baseline, control, plan = (modes[i] for i in sorted(modes))
    assert set(baseline) == set(control) == {"keep"}
    assert plan[-1] == "retain"
    assert allocator.mode() == "keep"


def test_one_rank_has_every_recipe_and_no_link(folder):
    found = run_job(task, 3, folder, replace(SHORT, frees_batch=True), silent)
    assert [arm.recipe for arm in found.arms] == ["baseline", "self", "plan", "plan_batch"]
    assert (found.ranks, found.round, found.link) == (1, 3, None)
    assert all(arm.alone is None for arm in found.arms)
    assert {arm.window_rows for arm in found.arms[:3]} == {float(task.batch_rows)}


def test_a_task_with_a_step_of_its_own_is_refused_before_a_job_is_launched(tmp_path):
    own = replace(task, step=lambda model, optimizer, batch: None)
    launched = []
    with pytest.raises(ValueGivenError, match="step"):
        scale(own, tmp_path / "table", ScaleSettings((1, 2)), lambda *job: launched.append(job), silent)
    assert not launched
