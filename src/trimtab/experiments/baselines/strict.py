"""P0, the baseline, in strict fp32: TF32 is disabled everywhere.

By default torch computes cuDNN convolutions in TF32, so a ResNet "in fp32" uses TF32 on GPUs that support it.
Comparisons run both baselines and name the baseline of every ratio. Without TF32, as for a GPT's matmuls or on most
CPUs, both loops are identical.
"""

from __future__ import annotations

import torch

from trimtab.core.errors import ValueGivenError
from trimtab.experiments.baselines.loop import hold_strict_fp32
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.tasks.task import Task


class StrictLoop(ReferenceLoop):
    """Baseline loop with strict fp32 until `close`.

    Raises:
        ValueGivenError: The declared precision of the task's reference is not fp32.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        if task.reference.precision != "fp32":
            raise ValueGivenError(
                "task.reference.precision",
                got=task.reference.precision,
                expected="fp32, which alone can be strict",
                hint="Leave out strict: the reference is what it is compared against.",
            )
        super().__init__(task, device)
        self._put_back = hold_strict_fp32()
