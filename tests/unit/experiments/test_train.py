"""`train`: what its figures count."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from raising import raises
from tiny_task import BATCH_SIZE, load_data
from tiny_task import task as tiny
from torch.nn import functional as F

from trimtab.core.energy_reading import Provenance
from trimtab.core.errors import LossError, ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.progress import silent
from trimtab.core.record import read_record
from trimtab.distributed import rank_energy
from trimtab.energy.meter_selection import Metering
from trimtab.experiments import train as train_module
from trimtab.experiments import train_command
from trimtab.experiments.train import TrainingOptions, train_whole
from trimtab.losses import Summed
from trimtab.plans.plan import Plan

STEPS = 6


def counting_loss(model, batch) -> Summed:
    """Return the loss over the rows of one class."""
    points, labels = batch
    kept = labels == 0
    return Summed(F.cross_entropy(model(points), labels, reduction="none")[kept].sum(), kept.sum())


def trained(**changes) -> dict:
    task = replace(tiny, terms="tokens", terms_per_sample=7, **changes)
    plan = Plan.fixed(BATCH_SIZE, 8)
    return train_whole(TrainingOptions(task, plan, STEPS), silent)


@pytest.fixture(autouse=True)
def second(monkeypatch):
    """Every run takes a second."""
    readings = iter((10.0, 11.0))
    monkeypatch.setattr(train_module, "time", SimpleNamespace(perf_counter=lambda: next(readings)))


def test_a_metric_beyond_its_unit_does_not_lose_the_run_that_it_is_of():
    metric = replace(tiny.metric, unit="share", evaluate=lambda model, batches: 27.0)
    assert trained(metric=metric)["accuracy"] == 27.0


def test_a_held_out_metric_that_is_called_loss_stands_beside_that_of_training():
    found = trained(metric=replace(tiny.metric, name="loss", evaluate=lambda model, batches: 0.25))
    assert found["held_out_loss"] == 0.25
    assert found["loss"] > 0.25


def test_the_tokens_of_a_second_are_those_the_loss_counted_else_the_tasks():
    batches = load_data().batches(0, BATCH_SIZE)
    counted = sum(int((next(batches)[1] == 0).sum()) for _ in range(STEPS))
    assert 0 < counted < STEPS * BATCH_SIZE
    assert trained(loss_fn=counting_loss)["tokens_per_s"] == counted


def test_a_count_that_is_a_number_is_added_up_too():
    def loss_fn(model, batch):
        return Summed(tiny.loss_fn(model, batch) * len(batch[0]), 5)

    assert trained(loss_fn=loss_fn)["tokens_per_s"] == 5 * STEPS * BATCH_SIZE / 8


class Steady:
    """A meter of a machine that takes the same at any time."""

    provenance, sources, period_s = Provenance.MEASURED, ("a steady counter",), math.inf

    def joules(self) -> float:
        return 20.0 * time.monotonic()


def test_the_record_of_a_metered_run_has_the_watts_of_a_second_before_it(tmp_path):
    path = tmp_path / "run.jsonl"
    train_whole(
        TrainingOptions(tiny, Plan.fixed(BATCH_SIZE, 8), STEPS, record=path, metering=Metering(meter=Steady())), silent
    )
    # As far as a busy machine lets the clock be read when the meter is.
    assert read_record(path).header.detail["meter"]["idle_w"] == pytest.approx(20.0, rel=0.25)


def test_no_second_is_idle_where_no_record_begins(tmp_path, monkeypatch):
    def waits(_):
        raise AssertionError("a second in which nothing is done")

    monkeypatch.setattr(rank_energy, "with_idle", waits)
    path = tmp_path / "run.jsonl"
    path.touch()
    asked = TrainingOptions(tiny, Plan.fixed(BATCH_SIZE, 8), STEPS, metering=Metering(meter=Steady()))
    assert not replace(asked, record=path).begins_record  # a run that goes on, in its own
    assert replace(asked, record=tmp_path / "new.jsonl").begins_record
    train_whole(asked, silent)


def test_where_the_loss_is_a_mean_the_task_says_what_a_row_holds():
    assert trained()["tokens_per_s"] == 7 * STEPS * BATCH_SIZE


@pytest.mark.parametrize("count", ["many", -1])
def test_a_count_that_is_none_is_refused_as_ever(count):
    with pytest.raises(LossError):
        trained(loss_fn=lambda model, batch: Summed(tiny.loss_fn(model, batch), count))


OF_TWO = Plan.fixed(4, num_ranks=2, zero_stage=0)


@pytest.mark.parametrize("accepts", [(), ("ranks",), ("plan",)])
def test_other_ranks_than_a_run_was_saved_with_are_refused_with_the_way_out(accepts):
    kept = SimpleNamespace(saved_plan=lambda: OF_TWO, accepts=accepts)
    with raises(ValueGivenError, code="resume.ranks_differ", field="--ranks"):
        train_command.plan_of_run(
            lambda **_: Plan.fixed(4), file=None, kept=kept, budget=Budget(), adapt=(), dry_runs=True
        )


def test_where_they_are_accepted_the_plan_is_made_anew():
    kept = SimpleNamespace(saved_plan=lambda: OF_TWO, accepts=("ranks", "plan"))
    given = {"file": None, "kept": kept, "budget": Budget(), "adapt": (), "dry_runs": True}
    assert train_command.plan_of_run(lambda **_: "made anew", **given) == "made anew"
    same = SimpleNamespace(saved_plan=lambda: Plan.fixed(4), accepts=("ranks", "plan"))
    assert train_command.plan_of_run(lambda **_: "made anew", **given | {"kept": same}) == Plan.fixed(4)
