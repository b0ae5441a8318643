"""Rebind an optimizer to new parameters: groups keep their order, and state moves by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import OptimizerError

Name = str


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Name]]:
    """Return the parameter names of an optimizer, by group.

    Raises:
        OptimizerError: a parameter does not belong to the model.
    """
    known = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    if any(parameter not in known for params in groups for parameter in params):
        raise OptimizerError(
            "optimizer",
            problem="The optimizer has a parameter that does not belong to the model.",
            hint="Build the optimizer from model.parameters().",
            code="optimizer.foreign_parameters",
        )
    return [[known[parameter] for parameter in params] for params in groups]


def point_at(
    optimizer: torch.optim.Optimizer,
    names: list[list[Name]],
    parameters: Mapping[Name, nn.Parameter],
    move: Callable[[Tensor, nn.Parameter], Tensor],
) -> None:
    """Replace an optimizer's parameters by the new parameters of the same names, and move their state.

    Args:
        optimizer: optimizer to change.
        names: parameter names by group.
        parameters: new parameters by name.
        move: converts a state tensor with the old parameter's shape for the new parameter.
    """
    before = [group["params"] for group in optimizer.param_groups]
    state: dict[Tensor, Any] = {}
    for group, old_parameters, new_names in zip(optimizer.param_groups, before, names, strict=True):
        group["params"] = [parameters[name] for name in new_names]
        for old, new in zip(old_parameters, group["params"], strict=True):
            if old in optimizer.state:
                state[new] = {key: _moved(value, old, new, move) for key, value in optimizer.state[old].items()}
    optimizer.state.clear()
    optimizer.state.update(state)


def _moved(value: Any, old: Tensor, new: nn.Parameter, move: Callable[[Tensor, nn.Parameter], Tensor]) -> Any:
    return move(value, new) if isinstance(value, Tensor) and value.shape == old.shape and value.dim() else value
