"""Functions `setup(seed)` of tasks: the unchanged loop, hand-tuned recipes, and baselines of the task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trimtab.core.batch_rule import warmup_cosine, warmup_linear
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.distributed.sharded_loader import shard
from trimtab.experiments.loops import Loop
from trimtab.tasks.placement import device_here, place_data, prefetch
from trimtab.tasks.task import RECIPES, StrongRecipe, Task, TaskData
from trimtab.training.batch import to_device

Setup = Callable[[int], Any]
STRICT = "strict"
_FINAL_FRACTION = 0.01  # Learning rate at the end of a recipe, as a fraction of the peak.


class TaskLoader:
    """The batches of a task's data in the order of a seed, without end, on the task's device.

    In a job of several ranks, this rank's samples of every batch.
    """

    def __init__(self, data: TaskData, batch_size: int, seed: int) -> None:
        self._data, self._batch_size, self._seed = data, batch_size, seed

    def __iter__(self) -> Iterator[Any]:
        return prefetch(shard(self._data.batches(self._seed, self._batch_size)), device_here())


class TaskLoops:
    """The loops of a task. The data are read and placed once.

    Attributes:
        task: the task.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._placed = functools.cache(lambda: place_data(task.load_data(), device_here()))

    @property
    def data(self) -> TaskData:
        """The task's data, on the device if they are small."""
        return self._placed()[0]

    @property
    def placement(self) -> str:
        """Where the data are and why; "" if they stay in host memory."""
        where = self._placed()[1]
        return f"training data on the {where.value}: {where.reason}" if where.changed else ""

    def setup(self, seed: int) -> Loop:
        """Return the task's unchanged loop."""
        task, device = self.task, device_here()
        model = task.make_model().to(device)
        own = task.step

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
            assert own is not None
            return own(model, optimizer, to_device(batch, device))

        def evaluate(model: nn.Module) -> dict[str, float]:
            return {task.metric.name: task.metric.check(task.metric.evaluate(model, self.data.held_out))}

        return Loop(
            model,
            task.make_optimizer(model),
            task.loss_fn,
            TaskLoader(self.data, task.batch_size, seed),
            evaluate=evaluate,
            step=None if own is None else step,
            reference=task.reference,
        )

    def recipe(self, name: str) -> Setup:
        """Return the function of a hand-tuned recipe or of a baseline of the task."""
        if name in self.task.recipes:
            return functools.partial(self._tuned, self.task.recipes[name])
        return lambda seed: self.task.baselines[name](self.task, self.setup(seed))

    def _tuned(self, recipe: StrongRecipe, seed: int) -> Loop:
        """Return the loop of a hand-tuned recipe.

        Fast precision, channels-last memory format, fused optimizer, warm-up and decay. The peak learning rate is the
        best of a sweep, or published. The loop is not compiled, because the gain of compilation is to be measured.
        """
        loop = self.setup(seed)
        torch.manual_seed(seed)
        model = (recipe.make_model or self.task.make_model)().to(device_here())
        if recipe.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = recipe.make_optimizer(model)
        schedule = _RecipeSchedule(optimizer, recipe, self.task.batch_size)
        return replace(
            loop,
            model=model,
            optimizer=optimizer,
            loss_fn=recipe.loss_fn or self.task.loss_fn,
            step=None,
            after_step=schedule.step,
            reference=Reference(recipe.precision, recipe.clip_norm),
        )


class _RecipeSchedule:
    """Learning rates of a recipe: warm-up and decay by samples, the first of them set at once."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: StrongRecipe, batch_size: int) -> None:
        self._optimizer, self._recipe, self._batch_size = optimizer, recipe, batch_size
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._samples = 0
        self.step()

    def step(self) -> None:
        """Set the learning rates of the next step."""
        self._samples += self._batch_size
        factor = recipe_factor(self._samples / self._recipe.budget_samples, self._recipe)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor


def recipe_factor(progress: float, recipe: StrongRecipe) -> float:
    """Return the learning-rate factor of a recipe's schedule at `progress` (0 to 1)."""
    found = warmup_linear if recipe.decay == "linear" else warmup_cosine
    return found(progress, recipe.warmup_fraction, _FINAL_FRACTION)


def require_recipes(task: Task, names: Iterable[str]) -> None:
    """Raise an error if a recipe is unavailable for the task.

    Raises:
        ValueGivenError: the task has no such recipe, or "strict" was named and the baseline is not in fp32.
    """
    is_fp32 = task.reference.precision == "fp32"
    known = (*((STRICT,) if is_fp32 else ()), *task.baselines, *task.recipes)
    for name in names:
        if name in known:
            continue
        problem = f"Task {task.name} has no recipe {name}."
        if name == STRICT:
            problem = (
                f"The recipe strict (fp32 without TF32) needs an fp32 baseline, but {task.name} uses "
                f"{task.reference.precision}."
            )
        added = f"{name}=StrongRecipe(...)" if name in RECIPES else f"baselines={{{name!r}: ...}}"
        more = "" if name == STRICT else f", or add Task(..., {added})"
        raise ValueGivenError("against", problem=problem, hint=f"Choose from {', '.join(known)}{more}.",
                              code="recipe.missing")  # fmt: skip
