"""P0 on several ranks: the task's loop as it stands, its model in torch's DistributedDataParallel with its defaults."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from trimtab.recipes.reference import ReferenceLoop
from trimtab.tasks.task import Task


class ReplicaLoop(ReferenceLoop):
    """The plain loop of one rank, which steps on its share of every batch; the rows that it counts are all ranks'.

    The gradient is the mean over ranks of each one's own, as DDP has it.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__(task, device)
        self._called = DistributedDataParallel(self.model)
