"""A plan's weight decay: one for all groups of the optimizer that decay, while a run is active.

Groups that decay nothing as the loop has them, of biases and norms above all, are left alone, and so are groups that
are added later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.core.errors import OptimizerError

_SAVES = ("state_dict", "load_state_dict")


def use_weight_decay(optimizer: torch.optim.Optimizer, decay: float) -> Callable[[], None]:
    """Set the weight decay of all groups that have one; returns what puts each back.

    Raises:
        OptimizerError: none has; or it is saved in a way of its own, which would save the plan's for the user's.
    """
    given, mine = type(optimizer).__name__, _decaying(optimizer)
    if any(getattr(type(optimizer), name) is not getattr(torch.optim.Optimizer, name) for name in _SAVES):
        expected, way_out = "an optimizer that is saved as torch's are", "Set its weight decay where it is built."
        raise OptimizerError(
            "plan.weight_decay", given=f"{given}, saved its own way", expected=expected, way_out=way_out
        )

    def switch(optimizer: torch.optim.Optimizer) -> None:
        for at in mine:
            optimizer.param_groups[at]["weight_decay"] = float(decay)

    def load(optimizer: torch.optim.Optimizer) -> None:
        found = _decaying(optimizer)
        mine.clear()
        mine.update(found)
        switch(optimizer)

    def save(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        _put(saved["param_groups"], mine)

    # A loaded state brings what it was saved with; a saved one must not carry the plan's beyond the run.
    hooks = optimizer.register_load_state_dict_post_hook(load), optimizer.register_state_dict_post_hook(save)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        _put(optimizer.param_groups, mine)

    switch(optimizer)
    return undo


def _decaying(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the weight decay of the groups that have one, by their place.

    Raises:
        OptimizerError: none has.
    """
    found = {at: group["weight_decay"] for at, group in enumerate(optimizer.param_groups) if group.get("weight_decay")}
    if not found:
        raise OptimizerError(
            "plan.weight_decay",
            given=f"{type(optimizer).__name__} without weight decay",
            expected="a group of parameters that decays, for a plan that says by how much",
            way_out="Give it some, as AdamW(..., weight_decay=0.01), or leave the plan's weight decay as it is.",
        )
    return found


def _put(groups: list[dict[str, Any]], mine: dict[int, float]) -> None:
    for at, decay in mine.items():
        if at < len(groups):  # one may have been taken out since
            groups[at]["weight_decay"] = decay
