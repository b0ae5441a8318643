"""Whether a batch may be split without being asked for."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from trimtab.core.plan import Mark, Plan


def keeps_maths(plan: Plan, model: nn.Module) -> bool:
    """Return whether splitting a batch keeps the maths, as far as is known.

    Not where the plan's check refused it, nor where the model has batch statistics.
    """
    refused = plan.check is not None and not plan.check.splittable
    return not refused and not has_batch_statistics(model)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether one of its modules normalises by its batch."""
    return any(map(normalises_by_batch, model.modules()))


def normalises_by_batch(module: nn.Module) -> bool:
    """Return whether a module does, where it is in training mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def for_model(plan: Plan, model: nn.Module) -> Plan:
    """Return a plan as it is for a model: splitting batch statistics unproved is other dynamics (tier F)."""
    if not plan.splits or plan.check is not None or keeps_maths(plan, model):
        return plan
    split = plan.micro_batch
    reason = f"{split.reason}; batch statistics are those of micro-batches"
    return replace(plan, micro_batch=replace(split, mark=Mark.DYNAMICS, reason=reason))
