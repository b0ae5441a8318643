"""`trimtab train FILE:FUNCTION`: the loop trains as by hand, over several epochs and across a resume."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

from trimtab.checkpoint.config import Checkpoints
from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.core.progress import silent
from trimtab.core.record import read_record
from trimtab.experiments.loop_training import LoopTraining
from trimtab.experiments.loops import Loop
from trimtab.plans.plan import Plan

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(index)) for index in range(3)]
PLAN = Plan.fixed(8, 4)
MADE: list[nn.Module] = []


def loss_fn(model, batch):
    return model(batch).square().mean()


def parts():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    MADE.append(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def evaluate(model):
    return {"loss": loss_fn(model, BATCHES[0])}


def setup(seed):
    return Loop(*parts(), loss_fn, BATCHES, evaluate)


def with_scheduler(seed):
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return Loop(model, optimizer, loss_fn, BATCHES, evaluate, after_step=scheduler.step)


def trained(setup, steps, plan=PLAN, **options):
    found = LoopTraining(setup, "setup", steps, seed=3, **options).train(plan, silent)
    return found, MADE[-1].state_dict()


def test_the_loop_trains_as_by_hand_over_several_epochs(tmp_path):
    found, weights = trained(setup, 7, record=tmp_path / "run.jsonl")
    torch.manual_seed(3)
    model, optimizer = parts()
    for step in range(7):
        optimizer.zero_grad()
        loss = loss_fn(model, BATCHES[step % 3])
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value)
    assert (found["steps"], found["samples"]) == (7, 56)
    assert found["loss"] == pytest.approx(loss.item())
    assert found["held_out_loss"] == pytest.approx(evaluate(model)["loss"].item())
    record = read_record(tmp_path / "run.jsonl")
    assert len(record.steps) == 7
    assert record.evaluations[-1].metrics["loss"] == pytest.approx(found["held_out_loss"])


def test_accumulated_batches_are_one_step():
    def accumulating(seed):
        return Loop(*parts(), loss_fn, BATCHES * 2, accumulate=2)

    found, _ = trained(accumulating, 4)
    assert (found["steps"], found["samples"]) == (4, 64)


def test_a_resumed_run_ends_as_an_uninterrupted_run(tmp_path):
    whole, weights = trained(with_scheduler, 8)
    trained(with_scheduler, 4, checkpoints=Checkpoints(tmp_path / "kept"))
    found, resumed = trained(with_scheduler, 8, checkpoints=Checkpoints(tmp_path / "kept"))
    assert found["resumed_at_samples"] == 32
    assert found["loss"] == whole["loss"]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def test_state_that_checkpoints_cannot_save_is_refused(tmp_path):
    def counting(seed):
        return Loop(*parts(), loss_fn, BATCHES, after_step=lambda: None)

    with raises(ValueGivenError, code="after_step.no_state"):
        trained(counting, 4, checkpoints=Checkpoints(tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()


def test_a_loader_without_batches_is_refused():
    with raises(LoopError, code="loader.empty"):
        trained(lambda seed: Loop(*parts(), loss_fn, []), 4)
