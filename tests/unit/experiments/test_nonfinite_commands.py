"""Commands whose loops become non-finite: an error, or no verdict, with the reason."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_task import BATCH_SIZE, BUDGET_SAMPLES, load_data, make_model
from tiny_task import task as tiny
from torch import nn

from trimtab.core.errors import NonFiniteError
from trimtab.core.progress import silent
from trimtab.experiments.ablation.ablation_result import AblatedChange
from trimtab.experiments.ablation.ablation_summary import headline as ablation_headline
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.comparison_summary import headline
from trimtab.experiments.comparison.ratio_rows import throughput_row
from trimtab.experiments.gain_timing import measure_gain
from trimtab.experiments.paired_runs.paired_run import PairedArm, race
from trimtab.experiments.paired_runs.plan_loops import PlanLoop
from trimtab.experiments.scaling.scaling_job import Bench, JobSettings
from trimtab.experiments.train import TrainingOptions, train_whole
from trimtab.plans.plan import Plan

PLAN = Plan.fixed(BATCH_SIZE, 8)
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:Training became non-finite:RuntimeWarning")


class Breaking(nn.Module):
    """A model whose output is NaN from some training step on."""

    def __init__(self, steps: int = 3):
        super().__init__()
        self.layers, self.steps, self.calls = make_model(), steps, 0

    def forward(self, points):
        self.calls += self.training and torch.is_grad_enabled()
        return self.layers(points) * (math.nan if self.training and self.calls > self.steps else 1.0)


def breaking_data():
    data = load_data()
    points, labels = data.columns
    points = points.clone()
    points[5, 3] = math.nan
    return replace(data, columns=(points, labels))


TASKS = {
    "a NaN in the data": replace(tiny, load_data=breaking_data),
    "a rate that diverges": replace(tiny, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e30)),
    "a model that breaks": replace(tiny, make_model=Breaking),
}


@pytest.mark.parametrize("cause", TASKS)
def test_train_ends_with_an_error_unless_another_policy_is_asked_for(cause):
    with pytest.raises(NonFiniteError):
        train_whole(TrainingOptions(TASKS[cause], PLAN, 20), silent)
    assert train_whole(TrainingOptions(TASKS[cause], PLAN, 20, nonfinite="continue"), silent)["steps"] == 20


def races(task, arms) -> comparison_statistics.Races:
    entries = [PairedArm(name, make, BUDGET_SAMPLES) for name, make in arms.items()]
    found = {seed: race(entries, task, task.load_data(), seed, CPU) for seed in range(2)}
    return {seed: {each.header.name: each for each in records} for seed, records in found.items()}


@pytest.mark.parametrize("cause", TASKS)
def test_a_race_of_non_finite_arms_has_no_verdict_and_says_why(cause):
    found = races(TASKS[cause], {"reference": ReferenceLoop, "equivalent_plan": partial(PlanLoop, plan=PLAN)})
    assert {record.end.reason for race in found.values() for record in race.values()} == {"diverged"}
    assert throughput_row(found, "equivalent_plan", "reference", "equivalent", None) is None
    verdict = headline(
        [],
        [],
        PLAN,
        {name: comparison_statistics.failed_with(found, name) for name in ("reference", "equivalent_plan")},
    )
    assert verdict.kind == "no verdict"
    assert comparison_statistics.error_of_run(found[0]["equivalent_plan"])[:40] in verdict.sentence
    alone = headline([], [], PLAN, {"reference": comparison_statistics.failed_with(found, "reference")})
    assert alone.kind == "no verdict"
    assert comparison_statistics.error_of_run(found[0]["reference"])[:40] in alone.sentence


def test_arms_that_are_only_timed_are_checked_too_and_one_that_breaks_leaves_the_others():
    entries = [PairedArm(n, ReferenceLoop, BUDGET_SAMPLES, is_timed_only=True) for n in ("reference", "self")]
    task = TASKS["a NaN in the data"]
    found = race(entries, task, task.load_data(), 0, CPU)
    assert {record.end.reason for record in found} == {"diverged"}

    def breaks(task, device):
        return ReferenceLoop(TASKS["a model that breaks"], device)

    found = races(tiny, {"reference": ReferenceLoop, "equivalent_plan": breaks})
    assert {race["reference"].end.reason for race in found.values()} == {"budget"}
    assert {race["equivalent_plan"].end.reason for race in found.values()} == {"diverged"}
    change = AblatedChange("precision", "precision bf16", "equivalent")
    verdict = ablation_headline([change], [], [], failed={"plan": "the loss is nan"})
    assert (verdict.kind, verdict.code) == ("no verdict", "speed.not_measured")
    assert "the loss is nan" in verdict.sentence


def bench(task) -> Bench:
    return Bench(task, task.load_data(), CPU, "weak", 0, JobSettings(("weak",), 1, 0.0), silent)


def test_a_scaling_table_has_no_row_of_a_plan_that_breaks(monkeypatch):
    its = bench(tiny)
    makes = {
        "baseline": ReferenceLoop,
        "plan": lambda task, device: ReferenceLoop(TASKS["a model that breaks"], device),
    }
    monkeypatch.setattr(its, "_makes", lambda plan: makes)
    assert [arm.recipe for arm in its.arms(PLAN)] == ["baseline"]
    (refused,) = its.refused
    assert (refused.recipe, refused.nonfinite) == ("plan", True)


def test_commands_on_a_loop_that_breaks_are_an_error():
    with pytest.raises(NonFiniteError) as raised:
        bench(TASKS["a NaN in the data"]).arms(None)
    assert raised.value.code == "training.nonfinite"
    task = TASKS["a model that breaks"]
    with pytest.raises(NonFiniteError) as raised:
        measure_gain(task, task.load_data(), CPU, PLAN, rounds=2)
    assert raised.value.code == "training.nonfinite"

    # The last step has a finite loss, and a gradient that is not.
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.scale = make_model(), nn.Parameter(torch.zeros(()))

        def forward(self, points):
            return self.layers(points) + self.scale.square().sqrt()  # whose gradient at zero is NaN

    with pytest.raises(NonFiniteError):
        train_whole(TrainingOptions(replace(tiny, make_model=Root), PLAN, 1), silent)
