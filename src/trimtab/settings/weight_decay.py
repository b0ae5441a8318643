"""The weight decay of a plan, applied while a run is active to all groups with a non-zero weight decay.

Groups without weight decay, usually biases and norms, and groups added later are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trimtab.core import validation
from trimtab.core.choice import Effect, Scalar
from trimtab.core.errors import OptimizerError
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    import torch

    from trimtab.plans.plan import Plan

_SAVES = ("state_dict", "load_state_dict")


class WeightDecay(Setting):
    """Weight decay of the optimizer's groups."""

    name = "weight_decay"
    default = None
    effect = Effect.TRAINING
    summary = "Weight decay of all parameter groups that have a non-zero one."
    values = "a number of at least 0, or None to leave every group unchanged"
    examples = (0.5,)
    acts_in_step = True
    trainer_decides = True
    before_sharding = True

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.number(self.field, value, low=0)

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        require_weight_decay(loop.optimizer)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        return use_weight_decay(loop.optimizer, float(value or 0.0))


def require_weight_decay(optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptimizerError` if no group has weight decay, or the optimizer would save the plan's value.

    An optimizer with own methods `state_dict` or `load_state_dict` would save the value.
    """
    import torch

    given = type(optimizer).__name__
    _decaying(optimizer)
    if any(getattr(type(optimizer), name) is not getattr(torch.optim.Optimizer, name) for name in _SAVES):
        raise OptimizerError(
            "plan.weight_decay",
            problem=f"The plan's weight decay cannot be applied, because {given} overrides state_dict or "
            f"load_state_dict.",
            got=given,
            hint=f"Pass the weight decay to {given} itself, and use a plan with weight_decay=None.",
            code="weight_decay.custom_state",
        )


def use_weight_decay(optimizer: torch.optim.Optimizer, decay: float) -> Callable[[], None]:
    """Set the weight decay of all groups with weight decay; return a function that restores the previous values.

    Raises:
        OptimizerError: see `require_weight_decay`.
    """
    require_weight_decay(optimizer)
    mine = _decaying(optimizer)

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

    # A loaded state has its own values; a saved state must not contain the plan's value, as it outlives the run.
    hooks = optimizer.register_load_state_dict_post_hook(load), optimizer.register_state_dict_post_hook(save)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        _put(optimizer.param_groups, mine)

    switch(optimizer)
    return undo


def _decaying(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the non-zero weight decays by group index.

    Raises:
        OptimizerError: no group has weight decay.
    """
    found = {at: group["weight_decay"] for at, group in enumerate(optimizer.param_groups) if group.get("weight_decay")}
    if not found:
        raise OptimizerError(
            "plan.weight_decay",
            got=f"{type(optimizer).__name__} without weight decay",
            expected="a parameter group with a non-zero weight_decay",
            hint="Create the optimizer with weight decay, such as AdamW(..., weight_decay=0.01), or use a plan with "
            "weight_decay=None.",
            code="weight_decay.none",
        )
    return found


def _put(groups: list[dict[str, Any]], mine: dict[int, float]) -> None:
    for at, decay in mine.items():
        if at < len(groups):  # A group may have been removed since.
            groups[at]["weight_decay"] = decay
