"""A plan's weight decay: one for all groups of the optimizer that decay, while a run is active.

Groups that decay nothing as the loop has them, of biases and norms above all, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.core.errors import OptimizerError


def use_weight_decay(optimizer: torch.optim.Optimizer, decay: float) -> Callable[[], None]:
    """Set the weight decay of all groups that have one; returns what puts each back.

    Raises:
        OptimizerError: none has.
    """
    before = {at: group["weight_decay"] for at, group in enumerate(optimizer.param_groups) if group.get("weight_decay")}
    if not before:
        raise OptimizerError(
            "plan.weight_decay",
            given=f"{type(optimizer).__name__} without weight decay",
            expected="a group of parameters that decays, for a plan that says by how much",
            way_out="Give it some, as AdamW(..., weight_decay=0.01), or leave the plan's weight decay as it is.",
        )

    def switch(optimizer: torch.optim.Optimizer) -> None:
        for at in before:
            optimizer.param_groups[at]["weight_decay"] = float(decay)

    def save(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        for at, mine in before.items():
            saved["param_groups"][at]["weight_decay"] = mine

    # A loaded state brings what it was saved with; a saved one must not carry the plan's beyond the run.
    hooks = optimizer.register_load_state_dict_post_hook(switch), optimizer.register_state_dict_post_hook(save)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for at, mine in before.items():
            optimizer.param_groups[at]["weight_decay"] = mine

    switch(optimizer)
    return undo
