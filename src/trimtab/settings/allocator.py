"""Host allocator: freed memory kept in the process saves page faults of the next step (CPU training)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Note, Scalar
from trimtab.settings.base import LiveLoop, Setting, Undo, one_of

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile

ALLOCATORS = ("keep", "retain")
# Page faults with a smaller promised saving are ignored.
WORTH_RETAINING = 0.02


class Allocator(Setting):
    """What glibc's malloc does with freed memory."""

    name = "allocator"
    title = "freed host memory"
    default = "keep"
    effect = Effect.BITWISE
    summary = "Freed host memory: retain keeps it in the process (training on a CPU, glibc)."
    values = "keep or retain"
    examples = ("retain",)
    is_searched = True
    blamed_last = True
    value_type = str

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, ALLOCATORS)

    def refusal(self, profile: Profile) -> Note | None:
        """Return the reason not to retain memory; the saving is estimated from the time of a step's page faults."""
        if not profile.loop.can_retain:
            return Note("allocator.unsupported", "freed memory can be kept on a CPU with glibc only")
        share = profile.fault_share
        if share is None or share / (1 - share) >= WORTH_RETAINING:
            return None
        faults = profile.loop.faults_per_step or 0
        text = f"not tried: {faults:,.0f} page faults take about {100 * share:.2g}% of a step"
        return Note("allocator.few_faults", text)

    def value_text(self, value: Scalar) -> str:
        return "kept" if value == "retain" else "returned"

    def phrase(self, value: Scalar) -> str:
        return "the loop with freed memory " + ("kept" if value == "retain" else "returned")

    def label(self, value: Scalar) -> str:
        return "" if value == self.default else "freed memory kept"

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.mixed_precision import retained_memory

        return retained_memory.hold()
