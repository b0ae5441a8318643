"""P2: the strong recipe's schedule, its values and its step."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from recipe_tasks import CPU, ROWS, batches, make_task, modes_of_a_loop, sgd, weights

from trimtab.core.batch_rule import warmup_linear
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.baselines.strong import StrongLoop
from trimtab.experiments.paired_runs.plan_loops import TunedRecipePlanLoop
from trimtab.losses import mean_of
from trimtab.plans.plan import Plan
from trimtab.tasks import BUILT_IN, StrongRecipe, load_task


def test_each_step_has_the_rate_of_the_rows_after_it():
    task = make_task()
    loop, data, rates = StrongLoop(task, CPU), batches(task), []
    for _ in range(100):
        assert loop.step(data) == ROWS
        rates.append(loop.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1 * warmup_linear(ROWS * i / 800, 0.1, 0.01) for i in range(1, 101)])
    assert max(rates) == pytest.approx(0.1)
    assert rates[0] == pytest.approx(0.01)  # the first step is not at rate 0
    assert rates[-1] == pytest.approx(0.001)


def by_hand(task, steps: int) -> torch.Tensor:
    torch.manual_seed(3)
    model = task.make_model()
    scaler = torch.amp.GradScaler("cpu", enabled=task.strong.precision == "fp16")
    if task.strong.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = task.strong.make_optimizer(model)
    data = batches(task)
    for i in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = 0.1 * warmup_linear(ROWS * i / 800, 0.1, 0.01)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=task.strong.precision == "fp16"):
            result = task.loss_fn(model, next(data))
        scaler.scale(mean_of(result)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


@pytest.mark.parametrize("kind", ["mlp", "gpt", "resnet"])
def test_the_strong_loop_is_the_loop_it_says(kind):
    task = make_task(kind)
    torch.manual_seed(3)
    loop, data = StrongLoop(task, CPU), batches(task)
    for _ in range(5):
        loop.step(data)
    loop.close()
    assert torch.equal(weights(loop.model), by_hand(task, 5))


def test_fp16_is_trained_under_a_loss_scale():
    task = make_task(strong=StrongRecipe(sgd(), "fp16", channels_last=False, budget_samples=800, clip_norm=0.5))
    torch.manual_seed(3)
    loop, data = StrongLoop(task, CPU), batches(task)
    for _ in range(5):
        loop.step(data)
    loop.close()
    assert torch.equal(weights(loop.model), by_hand(task, 5))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_recipe_in_tf32_trains_in_tf32_and_puts_the_modes_back(precision):
    recipe = StrongRecipe(sgd(), precision, channels_last=False, budget_samples=800)
    before, during, after = modes_of_a_loop(StrongLoop, strong=recipe)
    assert during == (("tf32", "tf32") if precision == "tf32" else before)
    assert after == before != ("tf32", "tf32")


def test_channels_last_is_applied_and_a_task_without_a_strong_recipe_says_so():
    loop = StrongLoop(make_task("resnet"), CPU)
    assert loop.model.stem[0].weight.shape == (16, 1, 3, 3)
    stage = loop.model.stages[0][0].conv1.weight
    assert stage.is_contiguous(memory_format=torch.channels_last)
    assert not stage.is_contiguous()
    with raises(ValueGivenError, code="value.invalid", field="task.strong"):
        StrongLoop(make_task(strong=None), CPU)


def test_a_plan_made_for_it_keeps_its_schedule_and_clipping():
    task = make_task()
    torch.manual_seed(3)
    loop = TunedRecipePlanLoop(task, CPU, Plan.fixed(ROWS, micro_batch=ROWS, clip_norm=0.5))
    data = batches(task)
    for _ in range(5):
        loop.step(data)
    loop.close()
    assert torch.allclose(weights(loop.model), by_hand(task, 5), atol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_peers_step_fused(name):
    """A peer that leaves a free gain behind is no peer."""
    strong = load_task(name).strong
    assert strong.make_optimizer(torch.nn.Linear(2, 2)).param_groups[0]["fused"] is True
