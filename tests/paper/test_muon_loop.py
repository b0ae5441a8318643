"""P3, and what a hand-tuned recipe may change besides its optimizer: decay, model and loss."""

from __future__ import annotations

import functools

import pytest
import torch
from raising import raises
from recipe_tasks import CPU, ROWS, batches, gpt, make_task, mlp, sgd, token_loss, weights
from torch.nn import functional as F
from trimtab.experiments.baselines.strong import StrongLoop, factor_at
from trimtab.experiments.paired_runs.plan_loops import TunedRecipePlanLoop

from benchmarks.paper.hand_tuned import MUON_RATE, muon_gpt
from trimtab.core.batch_rule import warmup_cosine, warmup_linear
from trimtab.core.errors import ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.tasks import StrongRecipe

MuonLoop = functools.partial(StrongLoop, field="muon")
STRONG = StrongRecipe(sgd(), "fp32", channels_last=False, budget_samples=800)


def test_a_loop_follows_its_recipes_decay():
    linear, cosine = (StrongRecipe(sgd(), "fp32", False, 800, decay=decay) for decay in ("linear", "cosine"))
    assert factor_at(0.3, linear) == warmup_linear(0.3, 0.1, 0.01)
    assert factor_at(0.3, cosine) == warmup_cosine(0.3, 0.1, 0.01)
    with raises(ValueGivenError, code="value.invalid", field="recipe.decay"):
        StrongRecipe(sgd(), "fp32", False, 800, decay="step")
    task = make_task(strong=StrongRecipe(sgd(), "fp32", False, 800, decay="cosine"))
    loop, data, rates = StrongLoop(task, CPU), batches(task), []
    for _ in range(100):
        loop.step(data)
        rates.append(loop.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1 * warmup_cosine(ROWS * i / 800, 0.1, 0.01) for i in range(1, 101)])


def smoothed(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, label_smoothing=0.3)


@pytest.mark.parametrize("make_loop", [StrongLoop, functools.partial(TunedRecipePlanLoop, plan=Plan.fixed(ROWS))])
def test_a_recipe_trains_its_own_model_by_its_own_loss(make_loop):
    recipe = StrongRecipe(sgd(), "fp32", False, 800, make_model=functools.partial(mlp, dropout=0.0), loss_fn=smoothed)
    task = make_task(strong=recipe)
    torch.manual_seed(3)
    loop = make_loop(task, CPU)
    assert loop.model[2].p == 0.0
    loop.step(batches(task))
    loop.close()
    torch.manual_seed(3)
    model = mlp(dropout=0.0)
    smoothed(model, next(batches(task))).backward()
    with torch.no_grad():
        expected = torch.cat(
            [(p - 0.1 * warmup_linear(0.01, 0.1, 0.01) * p.grad).flatten() for p in model.parameters()]
        )
    torch.testing.assert_close(weights(loop.model), expected)


def muon_task():
    return make_task("gpt", strong=STRONG, muon=muon_gpt(STRONG, rate=1e-2))


def test_p3_is_p2_with_another_optimizer():
    task = muon_task()
    loop, data = MuonLoop(task, CPU), batches(task)
    for _ in range(10):
        assert loop.step(data) == ROWS
    muons, rest = loop.optimizer.param_groups
    factor = warmup_linear(ROWS * 10 / 800, 0.1, 0.01)
    assert muons["lr"] == pytest.approx(MUON_RATE * factor)
    assert rest["lr"] == pytest.approx(1e-2 * factor)
    assert (loop.precision, loop.recipe.budget_samples) == ("fp32", 800)
    assert not torch.equal(weights(loop.model), weights(StrongLoop(task, CPU).model))
    loop.close()


def test_p3_learns():
    task = muon_task()
    torch.manual_seed(0)
    loop, data = MuonLoop(task, CPU), batches(task)
    batch = next(batches(task))

    def loss() -> float:
        return token_loss(loop.model, batch).loss_sum.item()

    before = loss()
    for _ in range(100):
        loop.step(data)
    loop.close()
    assert loss() < 0.9 * before


def test_a_task_without_a_recipe_with_muon_says_so():
    with raises(ValueGivenError, code="value.invalid", field="task.muon"):
        MuonLoop(make_task("gpt", make_model=gpt), CPU)
    with raises(ValueGivenError, code="value.invalid", field="task.muon"):
        make_task(muon=3)
