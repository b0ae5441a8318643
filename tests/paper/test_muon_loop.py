"""P3, and what a hand-tuned recipe may change besides its optimizer: decay, model and loss."""

from __future__ import annotations

import functools

import pytest
import torch
from raising import raises
from recipe_tasks import ROWS, batches, make_task, mlp, sgd, token_loss, weights
from torch.nn import functional as F

from benchmarks.paper.hand_tuned import MUON_RATE, muon_gpt
from trimtab.core.batch_rule import warmup_cosine, warmup_linear
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import plain_steps, planned_steps
from trimtab.experiments.task_loops import TaskLoops, recipe_factor, require_recipes
from trimtab.losses import mean_of
from trimtab.plans.plan import Plan
from trimtab.tasks import StrongRecipe

STRONG = StrongRecipe(sgd(), "fp32", channels_last=False, budget_samples=800)


def loop_of(task, recipe, seed=3):
    return loop_setup.build(TaskLoops(task).recipe(recipe), seed)


def train(task, loop, num_steps, steps_of=plain_steps):
    """Take steps of a loop and return the learning rates of every step, by parameter group."""
    running, rates = steps_of(loop, batches(task)), []
    for _ in range(num_steps):
        rates.append([group["lr"] for group in loop.optimizer.param_groups])
        assert next(running).samples == ROWS
    running.close()
    return rates


def test_a_loop_follows_its_recipes_decay():
    linear, cosine = (StrongRecipe(sgd(), "fp32", False, 800, decay=decay) for decay in ("linear", "cosine"))
    assert recipe_factor(0.3, linear) == warmup_linear(0.3, 0.1, 0.01)
    assert recipe_factor(0.3, cosine) == warmup_cosine(0.3, 0.1, 0.01)
    assert recipe_factor(0.3, linear) != recipe_factor(0.3, cosine)
    task = make_task(strong=cosine)
    rates = [rate for (rate,) in train(task, loop_of(task, "strong"), 100)]
    assert rates == pytest.approx([0.1 * warmup_cosine(ROWS * step / 800, 0.1, 0.01) for step in range(1, 101)])


def test_an_unknown_decay_is_refused():
    with raises(ValueGivenError, code="value.invalid", field="recipe.decay"):
        StrongRecipe(sgd(), "fp32", False, 800, decay="step")


def smoothed(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, label_smoothing=0.3)


def with_plan(loop, drawn):
    return planned_steps(loop, drawn, Plan.fixed(ROWS))


@pytest.mark.parametrize("steps_of", [plain_steps, with_plan], ids=["plain", "with a plan"])
def test_a_recipe_trains_its_own_model_by_its_own_loss(steps_of):
    recipe = StrongRecipe(sgd(), "fp32", False, 800, make_model=functools.partial(mlp, dropout=0.0), loss_fn=smoothed)
    task = make_task(strong=recipe)
    loop = loop_of(task, "strong")
    assert loop.model[2].p == 0.0
    train(task, loop, 1, steps_of)
    torch.manual_seed(3)
    model = mlp(dropout=0.0)
    smoothed(model, next(batches(task))).backward()
    rate = 0.1 * warmup_linear(0.01, 0.1, 0.01)
    with torch.no_grad():
        expected = torch.cat([(p - rate * p.grad).flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(loop.model), expected)


def muon_task():
    return make_task("gpt", strong=STRONG, muon=muon_gpt(STRONG, rate=1e-2))


def test_p3_is_p2_with_another_optimizer():
    task = muon_task()
    loop = loop_of(task, "muon")
    assert loop.reference == Reference("fp32")
    assert task.muon.budget_samples == STRONG.budget_samples
    rates = train(task, loop, 10)
    factors = [warmup_linear(ROWS * step / 800, 0.1, 0.01) for step in range(1, 11)]
    assert [rate for each in rates for rate in each] == pytest.approx(
        [rate * factor for factor in factors for rate in (MUON_RATE, 1e-2)]
    )


def test_p3_is_the_plain_loop_of_its_optimizer():
    """By hand: the recipe's optimizer and rates, on the same weights and batches."""
    task = muon_task()
    loop, data = loop_of(task, "muon"), batches(task)
    train(task, loop, 5)
    torch.manual_seed(3)
    model = task.make_model().train()
    optimizer = task.muon.make_optimizer(model)
    for step in range(1, 6):
        for group, peak in zip(optimizer.param_groups, (MUON_RATE, 1e-2), strict=True):
            group["lr"] = peak * warmup_linear(ROWS * step / 800, 0.1, 0.01)
        optimizer.zero_grad()
        mean_of(task.loss_fn(model, next(data))).backward()
        optimizer.step()
    assert torch.equal(weights(loop.model), weights(model))
    strong = loop_of(task, "strong")
    train(task, strong, 5)
    assert not torch.equal(weights(loop.model), weights(strong.model))


def test_p3_learns():
    task = muon_task()
    loop, batch = loop_of(task, "muon", seed=0), next(batches(task))
    before = token_loss(loop.model, batch).loss_sum.item()
    train(task, loop, 100)
    assert token_loss(loop.model, batch).loss_sum.item() < 0.9 * before


def test_a_task_without_a_recipe_with_muon_is_refused():
    with raises(ValueGivenError, code="recipe.missing"):
        require_recipes(make_task("gpt"), ("muon",))
    require_recipes(muon_task(), ("muon",))
    with raises(ValueGivenError, code="value.invalid", field="task.muon"):
        make_task(muon=3)
