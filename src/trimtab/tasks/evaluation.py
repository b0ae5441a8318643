"""Judging a model without leaving a trace: training mode kept, no gradients, batches moved to the model's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode without gradients, then each back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # Not inference_mode: its tensors, kept by an autocast cache, cannot take part in a later backward.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def beside(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the batch on the device of the model's parameters."""
    parameter = next(model.parameters(), None)
    return batch if parameter is None else tuple(column.to(parameter.device) for column in batch)
