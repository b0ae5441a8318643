"""Optimizers that set their own learning rate (`lr=None`) train, with and without a record."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from small_loops import square_loss as loss_fn
from small_loops import train_plainly, trained
from torch import nn

import trimtab
from trimtab.core.errors import OptimizerError
from trimtab.core.record import read_record
from trimtab.experiments.pages import run_page
from trimtab.plans.plan import Plan

ROWS = 8


class Relative(torch.optim.Optimizer):
    """An optimizer whose rate follows the size of the parameter."""

    def __init__(self, parameters, lr=None):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = 1e-2 * parameter.norm() if group["lr"] is None else group["lr"]
                    parameter.sub_(rate * parameter.grad.sign())


def adafactor(parameters):
    return pytest.importorskip("transformers.optimization").Adafactor(
        parameters, relative_step=True, warmup_init=True, scale_parameter=True
    )


OPTIMIZERS = {"of the user's own": Relative, "Adafactor": adafactor}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, 4, generator=generator) for _ in range(3)]


@every_optimizer
@pytest.mark.parametrize("is_recorded", [False, True])
def test_training_is_that_of_the_plain_loop(make, is_recorded, tmp_path):
    reference, model = mlp(), mlp()
    optimizer = make(reference.parameters())
    train_plainly(reference, optimizer, batches(), loss_fn)
    path = tmp_path / "run.jsonl"
    record = trimtab.RecordWriter(path, trimtab.Header("unset")) if is_recorded else None
    trained(model, make(model.parameters()), Plan.fixed(ROWS), batches(), loss_fn, record=record)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), model.parameters(), strict=True))
    if record is not None:
        record.close()
        found = read_record(path)
        assert [step.learning_rate for step in found.steps] == [None] * 3
        assert "learning rate" not in run_page(found)


@every_optimizer
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan.fixed(ROWS, learning_rate_scale=2.0), {}),
        (Plan.fixed(ROWS, schedule="warmup_cosine"), {"total_samples": 100}),
        (Plan.fixed(ROWS, batch_rule=trimtab.BatchRule()), {}),
    ],
)
def test_a_rate_of_the_plans_is_refused(make, plan, options):
    model = mlp()
    with raises(OptimizerError, code="optimizer.rate_unset"):
        trimtab.start(model, make(model.parameters()), plan, **options)


def test_a_plan_is_made():
    model = mlp()
    plan = trimtab.plan(model, Relative(model.parameters()), loss_fn, batches()[0], num_blocks=3)
    trimtab.start(model, Relative(model.parameters()), plan).close()


@every_optimizer
def test_a_range_test_is_refused(make):
    model = mlp()
    with raises(OptimizerError, code="optimizer.rate_unset"):
        trimtab.plan(model, make(model.parameters()), loss_fn, batches()[0], adapt="learning_rate", data=batches())
