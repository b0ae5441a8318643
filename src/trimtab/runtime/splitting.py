"""Whether a batch may be split without being asked for."""

from __future__ import annotations

from torch import nn

from trimtab.core.plan import Plan


def keeps_maths(plan: Plan, model: nn.Module) -> bool:
    """Return whether splitting a batch keeps the maths, as far as is known.

    Not where the plan's check refused it, nor where the model has batch statistics.
    """
    refused = plan.check is not None and not plan.check.splittable
    return not refused and not any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())
