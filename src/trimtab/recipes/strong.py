"""P2, the strong peer: the best hand-tuned recipe for the same model, as the task carries it.

Fast precision, channels_last, a fused optimizer, its peak rate the best of a sweep, not told from it, or published and
not swept (`tasks/peers.py` says which), warm-up and decay to a hundredth; where the task overfits, more dropout or
smoothed labels. Never compiled: that has to be measured first, and is by the plan that is made for it.
Run it: `python -m trimtab.recipes.strong cifar10_resnet --steps 50`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trimtab.core.errors import ValueGivenError
from trimtab.core.schedule import warmup_cosine, warmup_linear
from trimtab.losses import mean_of
from trimtab.recipes.loop import autocast, hold_tf32, move
from trimtab.tasks.task import LossFn, StrongRecipe, Task

FINAL_FRACTION = 0.01  # of the peak rates, at the end


class StrongLoop:
    """The hand-tuned loop.

    Raises:
        ValueGivenError: the task has no such recipe.
    """

    field = "strong"

    def __init__(self, task: Task, device: torch.device) -> None:
        if self.field not in task.recipes:
            raise ValueGivenError(f"task.{self.field}", given="nothing", expected="a StrongRecipe")
        self.recipe = recipe = task.recipes[self.field]
        self.precision = recipe.precision
        self._task, self._device = task, device
        self.loss_fn: LossFn = recipe.loss_fn or task.loss_fn
        self.model = (recipe.make_model or task.make_model)().to(device).train()
        if self.recipe.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = self.recipe.make_optimizer(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._rows = 0
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self._put_back = hold_tf32(self.precision)

    def step(self, batches: Iterator[Any]) -> int:
        """Train on one batch at the schedule's rate."""
        self._rows += self._task.batch_rows
        factor = factor_at(self._rows / self.recipe.budget_rows, self.recipe)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.update(move(next(batches), self._device))
        return self._task.batch_rows

    def update(self, batch: Any) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        with autocast(self.precision, self._device):
            loss = mean_of(self.loss_fn(self.model, batch))
        self._scaler.scale(loss).backward()
        if self.recipe.clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def close(self) -> None:
        """Put the global fp32 modes back."""
        self._put_back()


def factor_at(progress: float, recipe: StrongRecipe) -> float:
    """Return the factor of a recipe's schedule on its peak rates."""
    found = warmup_linear if recipe.decay == "linear" else warmup_cosine
    return found(progress, recipe.warmup_fraction, FINAL_FRACTION)


if __name__ == "__main__":
    from trimtab.recipes.command import main

    main(StrongLoop)
