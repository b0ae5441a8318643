"""The reference on several ranks: the task's plain loop in torch's DistributedDataParallel with its defaults."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from trimtab.core.errors import ValueGivenError
from trimtab.recipes.reference import ReferenceLoop
from trimtab.tasks.task import Task


class ReplicatedLoop(ReferenceLoop):
    """The plain loop, whose every backward reduces gradients: what one line more gives it.

    Args:
        task: of one rank, whose `batch_rows` are its share; it is stepped with its share of batches.

    Raises:
        ValueGivenError: the task has a step function of its own, which knows nothing of ranks.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        if task.step is not None:
            given = "a step function, on several ranks"
            raise ValueGivenError("task.step", given=given, expected="loss_fn alone, which ranks can share")
        super().__init__(task, device)
        self._bare = self.model
        self.model = DistributedDataParallel(self.model)

    def close(self) -> None:
        """Let go of the model, whose gradients are this rank's own again."""
        self.model = self._bare
        super().close()
