"""Fused implementation of the optimizer: a single kernel for many parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Note, Scalar
from trimtab.settings.base import LiveLoop, Setting, Undo, true_or_false

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile


class FusedOptimizer(Setting):
    """torch's `fused=True` of Adam, AdamW and SGD, tested against the unfused step on this machine first."""

    name = "fused_optimizer"
    default = False
    effect = Effect.ROUNDING
    summary = "torch's fused implementation of Adam, AdamW or SGD."
    values = "true or false"
    examples = (True,)
    is_searched = True
    value_type = bool
    before_sharding = True

    def check(self, value: Scalar, plan: Plan) -> None:
        true_or_false(self, value)

    def in_loop(self, profile: Profile) -> Scalar:
        return profile.loop.is_fused

    def refusal(self, profile: Profile) -> Note | None:
        loop = profile.loop
        if loop.is_fused:
            return Note("optimizer.already_fused", "the optimizer is already fused")
        if loop.bitwise_only:
            return Note("loop.bitwise_only", loop.bitwise_only)
        if loop.supports_fused:
            return None
        unsupported = f"{loop.optimizer} with its current options has no fused implementation"
        return Note("optimizer.no_fused", loop.fused_refusal or unsupported)

    def phrase(self, value: Scalar) -> str:
        return f"the {'fused' if value else 'unfused'} optimizer"

    def title_of(self, value: Scalar) -> str:
        return "fused optimizer" if value else "unfused optimizer"

    def label(self, value: Scalar) -> str:
        return "fused" if value else ""

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        from trimtab.techniques.memory_format import sparse_gradient, sparse_module
        from trimtab.techniques.optimizers import is_fused, require_fused

        if is_fused(loop.optimizer):
            return
        if sparse := sparse_module(loop.model, loop.optimizer):
            raise sparse_gradient(sparse)
        require_fused(loop.optimizer)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.optimizers import is_fused, use_fused

        return None if is_fused(loop.optimizer) else use_fused(loop.optimizer)
