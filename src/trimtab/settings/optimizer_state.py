"""Storage of the optimizer's state in bf16, 8 or 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Scalar
from trimtab.settings.base import LiveLoop, Setting, Undo, one_of

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan

STORAGES = ("user", "bf16", "8bit", "4bit")


class OptimizerState(Setting):
    """Storage of the moments of Adam and AdamW, or of the momentum of SGD, for parameters with 4096 elements or more.

    Sources: Dettmers et al. 2022, arXiv:2110.02861 (8 bits); Li et al. 2023, arXiv:2309.01507 (4 bits).
    """

    name = "optimizer_state"
    default = "user"
    effect = Effect.TRAINING
    summary = "Storage of the state of Adam, AdamW or SGD for large parameters: fp32 as in torch, or fewer bits."
    values = "user, bf16, 8bit or 4bit"
    examples = ("bf16", "8bit", "4bit")
    acts_in_step = True
    trainer_decides = True

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, STORAGES)

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        from trimtab.techniques.low_bit_state import require_low_bit

        require_low_bit(loop.model, loop.optimizer)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.low_bit_state import use_low_bit

        return use_low_bit(loop.optimizer, str(value))
