"""Activation offload: the model's first blocks keep their saved tensors in pinned host memory.

Backward needs the tensors of the first blocks last, so their copies have the longest time. The numbers of blocks to
consider are found by `planner.recompute_candidates` from the measured blocks of the model and the measured bandwidth
between device and host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.choice import Effect, Note, Scalar
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile


class Offload(Setting):
    """Number of the model's first blocks with saved tensors in host memory, on CUDA."""

    name = "offload"
    title = "activation offload"
    default = None
    effect = Effect.BITWISE
    summary = "First blocks of the model whose saved activations are kept in pinned host memory (CUDA)."
    values = "a whole number of blocks, less than the model has, or None"
    examples = (2,)
    is_searched = True
    value_type = int | None

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.integer(self.field, value)

    def refusal(self, profile: Profile) -> Note | None:
        if profile.device.kind != "cuda":
            return Note("offload.no_cuda", "the device is no CUDA device")
        if profile.objective.memory == 0 and profile.limits(profile.budget).memory_bytes is None:
            return Note("offload.not_needed", "memory is neither limited nor weighted")
        if profile.host_link is None:
            return Note("offload.not_measured", "the bandwidth between host and device was not measured")
        return None

    def label(self, value: Scalar) -> str:
        return "" if value is None else f"{value} blocks offloaded"

    def value_text(self, value: Scalar) -> str:
        return "off" if value is None else f"{value} blocks"

    def phrase(self, value: Scalar) -> str:
        return "activations on the device" if value is None else f"activations of {value} blocks in host memory"

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        from trimtab.techniques.activation_offload import require_cuda, require_offload

        require_cuda(loop.device)
        require_offload(loop.model, int(value or 0), loop.plan.recompute_blocks)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.activation_offload import use_offload

        return use_offload(loop.model, int(value or 0), names=loop.plan.recompute_blocks)
