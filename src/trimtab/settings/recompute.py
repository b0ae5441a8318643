"""Activation checkpointing: blocks with kept and with recomputed activations.

Schedules are found by `planner.recompute_solver` from the measured blocks of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Scalar
from trimtab.core.recompute_schedule import check_recompute
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    from torch import nn

    from trimtab.plans.plan import Plan


class Recompute(Setting):
    """Schedule of recomputation, or "every_block"."""

    name = "recompute"
    title = "activation checkpointing"
    default = None
    effect = Effect.BITWISE
    summary = "Activation checkpointing of the model's blocks, in addition to the loop's own."
    values = "every_block, a schedule such as '0-3 (4) (5-6) ~7[0,2] ~8', or None"
    examples = ("every_block",)
    is_searched = True
    value_type = str | None

    def check(self, value: Scalar, plan: Plan) -> None:
        check_recompute(value, len(plan.recompute_blocks))

    def title_of(self, value: Scalar) -> str:
        return self.title  # The plan's reason names the blocks.

    def label(self, value: Scalar) -> str:
        return "" if value is None else f"activation checkpointing {value}"

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        return use_plan(loop.model, loop.plan)


def names_operators(value: Scalar) -> bool:
    """Return True if a schedule names operators of a block by number, as "~7[0,2]" does."""
    return "[" in str(value)


def use_plan(model: nn.Module, plan: Plan) -> Undo:
    """Recompute the activations of a model's blocks as a plan specifies; return a function that undoes the change."""
    from trimtab.techniques.activation_checkpointing import use_recomputation

    compiles = bool(plan.compiled.value)
    return use_recomputation(model, str(plan.recompute.value), plan.recompute_blocks, is_compiled=compiles)
