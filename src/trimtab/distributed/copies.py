"""A model and its optimizer once more, tied to each other as they are and to nothing of the user's."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer


def copied_together(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies of both, without gradients; the optimizer's hold the model's.

    Hooks on the optimizer's step are not copied, as torch's own copies of one have none: what they do is in no window.

    Raises:
        Exception: they cannot be copied: a tensor that was computed, for one, or what holds a lock.
    """
    memo: dict[int, Any] = {}
    own, its = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
    # torch copies its own of an optimizer alone. Functions are left out: a scheduler's `step` would step the original.
    for name, value in vars(optimizer).items():
        if name not in vars(its) and not callable(value):
            setattr(its, name, copy.deepcopy(value, memo))
    return own, its
