"""P0 in strict fp32: the reference, with TF32 off everywhere.

By default torch computes cuDNN's convolutions in TF32, so that a ResNet "in fp32" on a GPU that has it is not: both
are raced, and a ratio says against which. Where nothing rounds, as in a GPT's matmuls or on most processors, the two
are the same loop.
Run it: `python -m trimtab.recipes.strict cifar10_resnet --steps 50`
"""

from __future__ import annotations

import torch

from trimtab.core.errors import ValueGivenError
from trimtab.recipes.loop import hold_strict_fp32
from trimtab.recipes.reference import ReferenceLoop
from trimtab.tasks.task import Task


class StrictLoop(ReferenceLoop):
    """The plain loop, its fp32 whole while the loop lives.

    Raises:
        ValueGivenError: the reference is declared to compute in something else.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        if task.reference.precision != "fp32":
            raise ValueGivenError(
                "task.reference.precision",
                given=task.reference.precision,
                expected="fp32, which alone can be strict",
                way_out="Leave out strict: the reference is what it is compared against.",
            )
        super().__init__(task, device)
        self._put_back = hold_strict_fp32()


if __name__ == "__main__":
    from trimtab.recipes.command import main

    main(StrictLoop)
