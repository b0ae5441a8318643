"""Memory format of images; convolution kernels prefer channels_last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Note, Scalar
from trimtab.settings.base import LiveLoop, Setting, Undo, one_of

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile

MEMORY_LAYOUTS = ("keep", "channels_last")


class MemoryLayout(Setting):
    """Memory format of 4-dimensional parameters and of the optimizer state."""

    name = "memory_layout"
    title = "memory format"
    default = "keep"
    effect = Effect.ROUNDING
    summary = "Memory format of convolutions: channels_last stores the channels of a pixel together."
    values = "keep or channels_last"
    examples = ("channels_last",)
    is_searched = True
    value_type = str
    before_sharding = True

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, MEMORY_LAYOUTS)

    def refusal(self, profile: Profile) -> Note | None:
        loop = profile.loop
        if loop.bitwise_only:
            return Note("loop.bitwise_only", loop.bitwise_only)
        if loop.layout_hazard:
            return Note("layout.unsafe", f"channels_last is not safe: {loop.layout_hazard}")
        if loop.layout == "channels_last":
            return Note("layout.already", "the model is already in channels_last")
        return None if loop.has_convolutions else Note("layout.no_convolutions", "the model has no convolutions")

    def phrase(self, value: Scalar) -> str:
        return "your loop's memory format" if value == "keep" else str(value)

    def label(self, value: Scalar) -> str:
        return "" if value == self.default else str(value)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.memory_format import use_channels_last

        return use_channels_last(loop.model, loop.optimizer)
