"""Loops of a task: the unchanged loop, recipes and baselines are the plain loops they say, to the last bit."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from raising import raises
from recipe_tasks import ROWS, batches, cross_entropy, make_task, weights

from benchmarks.paper.recipes import command
from benchmarks.paper.recipes.paper import paper
from trimtab.core.batch_rule import warmup_linear
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import autocast, plain_steps, planned_steps, strict_steps
from trimtab.experiments.task_loops import TaskLoops, require_recipes
from trimtab.losses import mean_of
from trimtab.plans.plan import Plan
from trimtab.state.process_state import ProcessState, fp32_places
from trimtab.tasks import BUILT_IN, StrongRecipe, load_task

TINY_TASK = Path(__file__).parents[1] / "experiments" / "tiny_task.py"
STEPS = 5


def trained(task, recipe="", steps_of=plain_steps, steps=STEPS):
    own = TaskLoops(task)
    loop = loop_setup.build(own.recipe(recipe) if recipe else own.setup, 3)
    running = steps_of(loop, batches(task))
    found = [next(running) for _ in range(steps)]
    running.close()
    assert all(step.samples == ROWS for step in found)
    return weights(loop.model)


def by_hand(task, *, recipe=None):
    """Train as anyone would write it."""
    torch.manual_seed(3)
    model, reference = task.make_model().train(), task.reference
    if recipe is not None:
        reference = Reference(recipe.precision, recipe.clip_norm)
        if recipe.channels_last:
            model = model.to(memory_format=torch.channels_last)
    optimizer = (task if recipe is None else recipe).make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=reference.precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(reference.precision)
    for step, batch in enumerate(itertools.islice(batches(task), STEPS), 1):
        if recipe is not None:
            optimizer.param_groups[0]["lr"] = 0.1 * warmup_linear(ROWS * step / 800, 0.1, 0.01)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = mean_of(task.loss_fn(model, batch))
        scaler.scale(loss).backward()
        if reference.clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), reference.clip_norm)
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


REFERENCES = [Reference("fp32"), Reference("bf16"), Reference("fp16"), Reference("fp32", 0.05), Reference("fp16", 0.05)]


@pytest.mark.parametrize("reference", REFERENCES, ids=str)
@pytest.mark.parametrize("kind", ["mlp", "gpt", "resnet"])
def test_the_baseline_is_the_plain_loop_and_what_it_declares_makes_a_difference(kind, reference):
    task = make_task(kind, reference=reference)
    assert torch.equal(trained(task), by_hand(task))
    if reference != Reference("fp32"):
        assert not torch.equal(trained(task), trained(make_task(kind)))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["mlp", "gpt", "resnet"])
def test_a_hand_tuned_recipe_is_the_loop_it_says(kind, precision):
    task = make_task(kind)
    task = replace(task, strong=replace(task.strong, precision=precision))
    assert torch.equal(trained(task, "strong"), by_hand(task, recipe=task.strong))


def test_each_step_of_a_recipe_has_the_rate_of_the_samples_after_it():
    task = make_task()
    loop = loop_setup.build(TaskLoops(task).recipe("strong"), 0)
    running, rates = plain_steps(loop, batches(task)), []
    for _ in range(100):
        rates.append(loop.optimizer.param_groups[0]["lr"])
        next(running)
    assert rates == pytest.approx([0.1 * warmup_linear(ROWS * step / 800, 0.1, 0.01) for step in range(1, 101)])


def test_a_plan_for_a_recipe_keeps_its_schedule_and_clipping():
    task = make_task()
    plan = Plan.fixed(ROWS, micro_batch=ROWS)
    ours = trained(task, "strong", lambda loop, drawn: planned_steps(loop, drawn, plan))
    assert torch.allclose(ours, by_hand(task, recipe=task.strong), atol=1e-6)


def modes() -> list[str]:
    return [place.fp32_precision for place in fp32_places()]


@pytest.fixture
def rounding():
    """A process that lets everything round."""
    before = ProcessState.capture()
    for place in fp32_places():
        place.fp32_precision = "tf32"
    yield ["tf32"] * len(fp32_places())
    before.restore()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_loop_in_tf32_trains_in_tf32_and_puts_the_modes_back(precision):
    seen = []

    def noting(model, batch):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return cross_entropy(model, batch)

    before = modes()
    trained(make_task(loss_fn=noting, reference=Reference(precision)), steps=1)
    assert (seen == ["tf32"]) == (precision == "tf32")
    assert modes() == before


def test_strict_fp32_rounds_nowhere_and_puts_the_modes_back(rounding):
    seen = []

    def noting(model, batch):
        seen.append(modes())
        return cross_entropy(model, batch)

    trained(make_task(loss_fn=noting), steps_of=strict_steps, steps=1)
    assert seen == [["ieee"] * len(rounding)]
    assert modes() == rounding
    for kind in ("mlp", "gpt", "resnet"):
        assert torch.equal(trained(make_task(kind), steps_of=strict_steps), by_hand(make_task(kind)))


def test_a_users_own_step_is_called_with_model_optimizer_and_batch():
    calls = []

    def never(model, batch):
        raise AssertionError("the loss function is not the step's business")

    task = make_task(loss_fn=never, step=lambda *given: calls.append(given))
    loop = loop_setup.build(TaskLoops(task).setup, 0)
    found = next(plain_steps(loop, batches(task)))
    ((model, optimizer, batch),) = calls
    assert (model, optimizer, found.samples, found.loss) == (loop.model, loop.optimizer, ROWS, None)
    assert torch.equal(batch[0], next(batches(task))[0])


def test_a_baseline_of_the_task_changes_its_loop():
    task = make_task("gpt", baselines={"paper": paper, "slow": lambda task, loop: replace(loop, accumulate=2)})
    own = TaskLoops(task)
    assert own.recipe("slow")(0).accumulate == 2
    loop = loop_setup.build(own.recipe("paper"), 0)
    before, running = weights(loop.model), plain_steps(loop, batches(task))
    assert next(running).samples == 4 * ROWS
    assert not torch.equal(weights(loop.model), before)
    require_recipes(task, ("strict", "paper", "strong"))


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (make_task(strong=None), "strong"),
        (make_task(), "muon"),
        (make_task(), "other"),
        (make_task(reference=Reference("bf16")), "strict"),
    ],
    ids=["strong", "muon", "other", "strict"],
)
def test_a_recipe_that_a_task_lacks_is_refused(task, name):
    with raises(ValueGivenError, code="recipe.missing"):
        require_recipes(task, (name,))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_recipes_step_fused(name):
    """A recipe that leaves a free gain behind is no rival."""
    strong = load_task(name).strong
    assert isinstance(strong, StrongRecipe)
    assert strong.make_optimizer(torch.nn.Linear(2, 2)).param_groups[0]["fused"] is True


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_is_torchs(precision, dtype):
    with autocast(precision, torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_a_recipe_runs_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "reference", f"{TINY_TASK}:task", "--steps", "20", "--seed", "1"])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {step}" for step in range(2, 21, 2)]
    assert float(lines[-1].rpartition("accuracy ")[2]) > float(lines[0].rpartition("accuracy ")[2])
    given = ["command", "paper", f"{TINY_TASK}:task", "--steps", "2", "--rows", "8", "--judged", "1"]
    monkeypatch.setattr(sys, "argv", given)
    command.main()
    said = capsys.readouterr()
    assert [line.split("  ")[:2] for line in said.out.splitlines()] == [["step 1", "32 rows"], ["step 2", "64 rows"]]
    assert said.err.startswith("data: random points (made here)")
