"""Replacement of the user's optimizer for a part of the model: Muon for the matrices of the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Scalar
from trimtab.settings.base import LiveLoop, Setting, Undo, one_of

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan

OPTIMIZERS = ("user", "muon")


class OptimizerKind(Setting):
    """Optimizer of the matrices in the model's blocks; the remaining parameters keep the user's AdamW."""

    name = "optimizer"
    default = "user"
    effect = Effect.TRAINING
    summary = "Optimizer of the matrices of the model's blocks: Muon, with the user's AdamW for the rest."
    values = "user or muon"
    examples = ("muon",)
    acts_in_step = True
    trainer_decides = True
    before_sharding = True

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, OPTIMIZERS)

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        from trimtab.techniques.muon import hidden_matrices, require_muon

        require_muon(hidden_matrices(loop.model, loop.optimizer))

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.muon import use_muon

        return use_muon(loop.model, loop.optimizer)
