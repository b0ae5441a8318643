"""P0, the baseline, on several ranks: the task's loop with the model in DistributedDataParallel."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from trimtab.core.errors import ValueGivenError
from trimtab.distributed.ddp import BUFFERS
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.tasks.task import Task


class ReplicaLoop(ReferenceLoop):
    """Baseline loop of a rank, fed with the rank's shard of every batch. Sample counts are those of all ranks.

    DDP averages the gradients over ranks.

    Args:
        task: Task without a step function.
        device: Device of this rank.
        sends_buffers: True to broadcast buffers in every forward, as DDP does by default.

    Raises:
        ValueGivenError: The task has a step function, which would train every rank separately.
    """

    def __init__(self, task: Task, device: torch.device, *, sends_buffers: bool = True) -> None:
        if task.step is not None:
            given = "a step function, on several ranks"
            raise ValueGivenError("task.step", got=given, expected="loss_fn alone, which ranks can share")
        super().__init__(task, device)
        self._called = DistributedDataParallel(self.model, **{BUFFERS: sends_buffers})
