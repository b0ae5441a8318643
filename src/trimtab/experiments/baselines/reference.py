"""P0, the baseline: the task's unchanged loop. For built-in tasks this is the paper's baseline (section IV)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trimtab.experiments.baselines.loop import autocast, hold_tf32, move
from trimtab.losses import mean_of
from trimtab.tasks.task import Task


class ReferenceLoop:
    """Plain training loop with the declared precision and the task's optimizer, or with the user's step function.

    Attributes:
        loss: Loss of the last step, a scalar on the device. None before the first step and with a user's step function.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self.loss: Tensor | None = None
        self.precision = task.reference.precision
        self.model = task.make_model().to(device).train()
        self.optimizer = task.make_optimizer(self.model)
        self._called = self.model
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self._put_back = hold_tf32(self.precision)

    def step(self, batches: Iterator[Any]) -> int:
        """Train on one batch and return its number of samples."""
        batch = move(next(batches), self._device)
        if self._task.step is not None:
            self._task.step(self.model, self.optimizer, batch)
            return self._task.batch_size
        self.optimizer.zero_grad()
        with autocast(self.precision, self._device):
            loss = mean_of(self._task.loss_fn(self._called, batch))
        self._scaler.scale(loss).backward()
        self.loss = loss.detach()
        if self._task.reference.clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._task.reference.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return self._task.batch_size

    def close(self) -> None:
        """Restore the global fp32 modes."""
        self._put_back()
