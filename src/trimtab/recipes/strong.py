"""P2, the strong peer: the best hand-tuned recipe for the same model, as the task carries it.

Fast precision, channels_last, a fused optimizer, its peak rate the best of a sweep or not told from it, warm-up and
linear decay to a hundredth.
Run it: `python -m trimtab.recipes.strong cifar10_resnet --steps 50`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trimtab.core.errors import ValueGivenError
from trimtab.recipes.loop import autocast, hold_tf32, mean_loss, move
from trimtab.tasks.task import StrongRecipe, Task


class StrongLoop:
    """The hand-tuned loop."""

    def __init__(self, task: Task, device: torch.device) -> None:
        if task.strong is None:
            raise ValueGivenError("task.strong", given="nothing", expected="a StrongRecipe")
        self.recipe: StrongRecipe = task.strong
        self.precision = self.recipe.precision
        self._task, self._device = task, device
        self.model = task.make_model().to(device).train()
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
        factor = warmup_linear(self._rows / self.recipe.budget_rows, self.recipe.warmup_fraction)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.update(move(next(batches), self._device))
        return self._task.batch_rows

    def update(self, batch: Any) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        with autocast(self.precision, self._device):
            loss = mean_loss(self._task.loss_fn(self.model, batch))
        self._scaler.scale(loss).backward()
        if self.recipe.clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def close(self) -> None:
        """Put the global fp32 modes back."""
        self._put_back()


def warmup_linear(progress: float, warmup: float) -> float:
    """Return the factor on the peak rate: up over `warmup` of the run, then linearly down to 1% of it."""
    if progress < warmup:
        return progress / warmup
    return max(0.01, (1 - progress) / (1 - warmup))


if __name__ == "__main__":
    from trimtab.recipes.command import main

    main(StrongLoop)
