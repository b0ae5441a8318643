"""Training loops of plans in a paired run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.api import start
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.baselines.loop import MakeLoop, SteppedLoop
from trimtab.experiments.baselines.strong import StrongLoop
from trimtab.measure.finite_check import nonfinite_parameter
from trimtab.plans.plan import Plan
from trimtab.tasks.task import RECIPES, Task
from trimtab.techniques.cuda_graphs import steps_to_launch
from trimtab.training.apply_plan import WINDOWS

# Baseline recipes for paired runs, by name, and their availability in a task.

HAND_TUNED: Mapping[str, MakeLoop] = {field: partial(StrongLoop, field=field) for field in RECIPES}


def peers_of(task: Task) -> tuple[str, ...]:
    """Return the names that `--against` accepts for a task, including recipes that the task lacks."""
    return ("strict", *task.baselines, *RECIPES)


def usual_peers(task: Task) -> tuple[str, ...]:
    """Return the recipes of a comparison without `--against`: the task's own baselines and its hand-tuned recipe."""
    return (*task.baselines, "strong")


def require_peers(task: Task, named: Iterable[str]) -> None:
    """Raise an error if a named baseline recipe is unavailable for the task.

    Raises:
        ValueGivenError: the task has no such recipe, or "strict" was named and the reference is not fp32.
    """
    named, known = tuple(named), peers_of(task)
    lacking = {name: f"Task {task.name} has no recipe {name}." for name in named if name not in known}
    lacking |= {name: f"Task {task.name} has no recipe {name}." for name in RECIPES if name not in task.recipes}
    if task.reference.precision != "fp32":
        lacking["strict"] = (
            f"The recipe strict (fp32 without TF32) needs an fp32 baseline, but {task.name} uses "
            f"{task.reference.precision}."
        )
    for name in named:
        if name in lacking:
            others = ", ".join(p for p in known if p not in lacking)
            hint = f"Choose from {others}."
            if name in RECIPES:
                hint = f"Choose from {others}, or add Task(..., {name}=StrongRecipe(...))."
            elif name != "strict":
                hint = f"Choose from {others}, or add Task(..., baselines={{{name!r}: ...}})."
            raise ValueGivenError("against", problem=lacking[name], hint=hint, code="recipe.missing")


ON_ANOTHER_RANK = "the loss or a parameter on another rank is NaN or infinite"


def settling_steps(loop: SteppedLoop) -> int:
    """Return the number of steps until a loop reaches its steady state.

    More than one with CUDA graph capture or a checked compilation. These steps run at the model's original speed: a
    large part of a run of a few dozen steps, negligible in a long run.
    """
    return getattr(loop, "settling_steps", 1)


def nonfinite_in(loop: SteppedLoop) -> str:
    """Return a description of a non-finite loss or parameter of a loop, or "". Synchronises with the device.

    Every rank checks its own shard. Under fp16 the loss is not checked, because an overflow only causes a skipped
    step.
    """
    loss = None if getattr(loop, "precision", "") == "fp16" else getattr(loop, "loss", None)
    if isinstance(loss, Tensor) and not bool(torch.isfinite(loss).all()):
        return f"the loss is {float(loss):g}"
    name = nonfinite_parameter(loop.model)
    return "" if name is None else f"parameter {name} contains NaN or infinity"


def settling_steps_of(plan: Plan) -> int:
    """Return `settling_steps` of a loop with a plan."""
    return steps_to_launch(plan.compiled.value) or (WINDOWS if plan.compiled.value else 1)


class PlanLoop:
    """The task's model, optimizer and loss, trained with a plan applied.

    Attributes:
        hides_memory: True if the sharding backend holds tensors outside the model and the optimizer.
        settling_steps: steps until the loop reaches its steady state.
    """

    def __init__(self, task: Task, device: torch.device, plan: Plan, total_samples: int | None = None) -> None:
        self._task = task
        self.precision = plan.precision.value
        self.hides_memory, self.settling_steps = plan.engine.value == "deepspeed", settling_steps_of(plan)
        self.model = task.make_model().to(device).train()
        self.optimizer = task.make_optimizer(self.model)
        self._run = start(self.model, self.optimizer, plan, total_samples=total_samples or task.budget_samples)

    def step(self, batches: Iterator[Any]) -> int:
        """Train on the batches of one optimizer step, and return the number of samples over all ranks."""
        drawn = list(itertools.islice(batches, self._run.num_batches))
        self._run.train_step(self._run.window(*drawn), self._task.loss_fn)
        return len(drawn) * self._task.batch_size

    @property
    def loss(self) -> Tensor:
        """Mean loss of the last step, on the device."""
        return self._run.loss

    def close(self) -> None:
        """Close the run."""
        self._run.close()


class TunedRecipePlanLoop(StrongLoop):
    """The hand-tuned recipe with a plan applied to its step; the recipe's learning-rate schedule is kept."""

    def __init__(self, task: Task, device: torch.device, plan: Plan) -> None:
        super().__init__(task, device)
        self._run = start(self.model, self.optimizer, plan)
        self.precision, self.settling_steps = plan.precision.value, settling_steps_of(plan)

    def update(self, batch: Any) -> None:
        """Take an optimizer step."""
        self._run.train_step(self._run.window(batch), self.loss_fn)

    def close(self) -> None:
        """Close the run."""
        self._run.close()
        super().close()
