"""P2 and P3, the hand-tuned recipes for the same model, as defined by the task.

Fast precision, channels-last memory format, fused optimizer, warm-up and decay to 1% of the peak rate. If the task
overfits, also more dropout or label smoothing. The peak rate is the best of a sweep, not significantly worse than the
best, or published and not swept (see `tasks/peers.py`). The loop is not compiled, because the benefit of compilation
must be measured; a plan made for this recipe does so. P3 differs from P2 by its optimizer: Muon for the matrices of the
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trimtab.core.batch_rule import warmup_cosine, warmup_linear
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.baselines.loop import autocast, hold_tf32, move
from trimtab.losses import mean_of
from trimtab.tasks.task import LossFn, StrongRecipe, Task

FINAL_FRACTION = 0.01  # learning rate at the end, as a fraction of the peak


class StrongLoop:
    """Training loop of a hand-tuned recipe of the task.

    Args:
        task: Task with the recipe.
        device: Device to train on.
        field: Field of the task with the recipe: "strong" or "muon".

    Raises:
        ValueGivenError: The task has no recipe in this field.
    """

    def __init__(self, task: Task, device: torch.device, *, field: str = "strong") -> None:
        if field not in task.recipes:
            raise ValueGivenError(f"task.{field}", got="nothing", expected="a StrongRecipe")
        self.recipe = recipe = task.recipes[field]
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
        """Set the learning rate of the schedule and train on one batch. Returns the number of samples."""
        self._rows += self._task.batch_size
        factor = factor_at(self._rows / self.recipe.budget_samples, self.recipe)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.update(move(next(batches), self._device))
        return self._task.batch_size

    def update(self, batch: Any) -> None:
        """Take an optimizer step on a batch with the current learning rate."""
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
        """Restore the global fp32 modes."""
        self._put_back()


def factor_at(progress: float, recipe: StrongRecipe) -> float:
    """Return the learning-rate factor of the recipe's schedule at `progress` (0 to 1)."""
    found = warmup_linear if recipe.decay == "linear" else warmup_cosine
    return found(progress, recipe.warmup_fraction, FINAL_FRACTION)
