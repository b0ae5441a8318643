"""Helpers for evaluating a model without gradients and without changing its training mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode without gradients. Restores the training mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # Not inference_mode: autocast may cache an inference tensor, which a later backward cannot use.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def on_device_of_model(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the batch on the device of the model's parameters."""
    parameter = next(model.parameters(), None)
    return batch if parameter is None else tuple(column.to(parameter.device) for column in batch)
