"""One arm looked at on its own: where its seconds go, and what its loss counts in a row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_task import BATCH_SIZE, load_data
from tiny_task import task as tiny
from torch.nn import functional as F

from benchmarks.paper.recipes.paper import PaperLoop
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.paired_runs import instrumented_loop
from trimtab.experiments.paired_runs.inspect_arm import measure_arm
from trimtab.experiments.paired_runs.plan_loops import PlanLoop
from trimtab.losses import Summed, mean_of
from trimtab.plans.plan import Plan

CPU = torch.device("cpu")
# Rows that the loss below does not ignore.
KEPT = load_data().columns[1] == 0


def counting_loss(model, batch) -> Summed:
    """Return the loss over the rows of one class."""
    points, labels = batch
    kept = labels == 0
    return Summed(F.cross_entropy(model(points), labels, reduction="none")[kept].sum(), kept.sum())


def own_step(model, optimizer, batch) -> None:
    mean_of(counting_loss(model, batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


def facts(make=ReferenceLoop, **changes) -> ArmMetrics:
    return measure_arm(make, replace(tiny, terms_per_sample=3, **changes), load_data(), CPU)


def split(task, device) -> PlanLoop:
    return PlanLoop(task, device, Plan.fixed(BATCH_SIZE, 8))


def test_a_step_of_the_users_own_hides_its_forward_and_counts_as_the_declared_loss_does():
    # Timed with the backward, it must not carry the name of what other arms spend on theirs alone.
    assert list(facts().phases_s) == ["data", "forward", "backward", "optimizer", "rest"]
    assert list(facts(step=own_step).phases_s) == ["data", "optimizer", "forward, backward and rest"]
    reference = facts(loss_fn=counting_loss)
    assert facts(loss_fn=counting_loss, step=own_step).terms_per_sample == pytest.approx(
        reference.terms_per_sample, abs=0.08
    )
    whole, sliced = (facts(make, loss_fn=counting_loss).terms_per_sample for make in (ReferenceLoop, split))
    assert whole == sliced


def test_phases_are_of_a_batch_however_many_a_step_takes(monkeypatch):
    """P1 takes several batches a step: on a clock that counts its readings, their data is one batch's each."""
    monkeypatch.setattr(instrumented_loop, "time", SimpleNamespace(perf_counter=itertools.count(0.0).__next__))
    reference, paper = facts().phases_s, facts(PaperLoop).phases_s
    assert paper["data"] == reference["data"]
    assert paper["optimizer"] < reference["optimizer"]


@pytest.mark.parametrize("make", [ReferenceLoop, split, PaperLoop])
def test_terms_are_what_the_loss_counted(make):
    """About a quarter of the rows is of the one class."""
    assert facts(make, loss_fn=counting_loss).terms_per_sample == pytest.approx(float(KEPT.float().mean()), abs=0.08)


@pytest.mark.parametrize("step", [None, lambda model, optimizer, batch: None])
def test_where_the_loss_is_a_mean_the_task_says_what_a_row_holds(step):
    assert facts(step=step).terms_per_sample == 3.0


def test_facts_that_lack_what_is_known_today_are_not_current():
    found = facts()
    assert found.is_current
    assert from_json(ArmMetrics, to_json(found)) == found
    assert not replace(found, precision="").is_current
    assert not replace(found, terms_per_sample=None).is_current
    assert not from_json(ArmMetrics, '{"peak_bytes": 1, "flops_per_sample": 1.0, "precision": "fp32"}').is_current
    assert ArmMetrics(None, error="out of memory").is_current
