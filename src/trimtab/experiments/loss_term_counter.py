"""A task's loss with a count of its terms, for throughput."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.distributed.process_group import total
from trimtab.losses import parts_of
from trimtab.tasks.task import Task


class CountedTerms:
    """A task's loss with a count of its terms.

    Attributes:
        pending: remaining zero-weight micro-batches, run only to take part in collectives; their counts are ignored.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._is_mean = False
        self._sum: Any = 0.0  # A tensor if the counts are tensors: reading a count would synchronise with the device.
        self._last: Any = 0.0
        self.pending = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the task's loss."""
        self._add_last()
        result = self._task.loss_fn(model, batch)
        count = parts_of(result).count
        self._is_mean, self._last = count is None, 0.0 if count is None or self.pending > 0 else count
        self.pending -= 1
        return result

    def _add_last(self) -> None:
        """Add the last count, delayed until the run has accepted it (otherwise the run raises)."""
        last = self._last.detach().double() if isinstance(self._last, Tensor) else self._last
        self._sum, self._last = self._sum + last, 0.0

    def terms(self, rows: int) -> float:
        """Return the terms of all `rows` samples over all ranks."""
        self._add_last()
        return rows * float(self._task.terms_per_sample) if self._is_mean else total(float(self._sum))
