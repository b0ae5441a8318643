"""P0 on several ranks: the task's loop as it stands, its model in torch's DistributedDataParallel with its defaults."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from trimtab.core.errors import ValueGivenError
from trimtab.distributed.data_parallel import BUFFERS
from trimtab.recipes.reference import ReferenceLoop
from trimtab.tasks.task import Task


class ReplicaLoop(ReferenceLoop):
    """The plain loop of one rank, which steps on its share of every batch; the rows that it counts are all ranks'.

    The gradient is the mean over ranks of each one's own, as DDP has it.

    Args:
        sends_buffers: in every forward, as DDP does by default.

    Raises:
        ValueGivenError: the task has a step function of its own, which would train on each rank by itself.
    """

    def __init__(self, task: Task, device: torch.device, *, sends_buffers: bool = True) -> None:
        if task.step is not None:
            given = "a step function, on several ranks"
            raise ValueGivenError("task.step", given=given, expected="loss_fn alone, which ranks can share")
        super().__init__(task, device)
        self._called = DistributedDataParallel(self.model, **{BUFFERS: sends_buffers})
