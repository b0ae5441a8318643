"""Conditions under which a batch may be split without a request by the user."""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch import nn

from trimtab.core.choice import Effect
from trimtab.plans.plan import Plan


class UnprovedSplitWarning(UserWarning):
    """A plan set by hand splits the batch without a check that this keeps the gradient."""


def warn_of_unproved_split(plan: Plan, model: nn.Module) -> None:
    """Warn if a plan splits the batch without a check that proves equivalence (stack level of the caller's caller).

    No warning if the user's own loop accumulates gradients over the same split.
    """
    if not plan.splits or plan.proves_splitting:
        return
    if plan.check is not None and plan.splits_as_the_loop:
        return
    split = f"The plan splits a batch of {plan.batch_size} samples into micro-batches of {plan.micro_batch.value}"
    named = model.named_modules() if isinstance(model, nn.Module) else ()  # Refused later otherwise.
    normalised = [name for name, each in named if each.training and normalises_by_batch(each)]
    if plan.check is None:
        text = f"{split}, but no check proves that this keeps the gradient. "
        if normalised:
            text += (
                f"The model has batch normalisation ({normalised[0]!r}), whose statistics would be computed per "
                "micro-batch, so that training changes. Use a plan without micro_batch, set the layers to evaluation "
                "mode, or replace them by GroupNorm."
            )
        else:
            text += (
                "A loss or layer that computes over the whole batch (contrastive loss, batch statistics, mean over "
                "tokens) trains differently on micro-batches. Make the plan with trimtab.plan(...), which checks the "
                "split."
            )
    else:
        text = (
            f"{split}, although splitting changes training: {plan.check.reason}. Use a micro-batch of the whole batch."
        )
    warnings.warn(text, UnprovedSplitWarning, stacklevel=3)


def keeps_maths(plan: Plan, model: nn.Module) -> bool:
    """Return True if, as far as is known, splitting a batch keeps the numerics.

    False if the plan's check found a difference, or if the model has batch statistics.
    """
    refused = plan.check is not None and not plan.check.splittable
    return not refused and not has_batch_statistics(model)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return True if a module of the model normalises over the batch."""
    return any(map(normalises_by_batch, model.modules()))


def normalises_by_batch(module: nn.Module) -> bool:
    """Return True if a module normalises over the batch in training mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def for_model(plan: Plan, model: nn.Module) -> Plan:
    """Return a plan adjusted to a model: an unproved split of batch statistics is marked as a change of training."""
    if not plan.splits or plan.check is not None or keeps_maths(plan, model):
        return plan
    split = plan.micro_batch
    reason = f"{split.reason}; batch statistics are computed per micro-batch"
    return plan.having(micro_batch=replace(split, effect=Effect.TRAINING, reason=reason))
