"""Independent copies of a model and its optimizer for a dry run."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer


def copied_together(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies of a model and its optimizer without gradients; the optimizer's copy refers to the model's copy.

    Step hooks of the optimizer are not copied, as in `copy.deepcopy`, so dry runs exclude hooks.

    Raises:
        Exception: an object cannot be copied, for instance a non-leaf tensor or a lock.
    """
    memo: dict[int, Any] = {}
    own, its = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
    # deepcopy of an optimizer copies torch's attributes only. Functions are left out: a scheduler's `step` wrapper
    # would step the original.
    for name, value in vars(optimizer).items():
        if name not in vars(its) and not callable(value):
            setattr(its, name, copy.deepcopy(value, memo))
    return own, its
