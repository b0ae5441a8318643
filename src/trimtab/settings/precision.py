"""Precision of the forward: autocast, and the TF32 mode of matrix products (paper eqs. 13-16; math: section 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.core.choice import Choice, Effect, Note, Scalar
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import PRECISIONS, precision_name
from trimtab.settings.base import LiveLoop, Setting, Undo, one_of

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile

# A precision with slower matrix products than this multiple of fp32's is not tried: it would only add casts.
SCREEN = 1.2
HALF = ("bf16", "fp16")  # Precisions under autocast.


class Precision(Setting):
    """Precision of the forward under autocast; fp16 adds dynamic loss scaling."""

    name = "precision"
    default = "fp32"
    effect = Effect.ROUNDING
    summary = "Precision of forward and backward: autocast to bf16 or fp16 (with loss scaling), or TF32 products."
    values = "fp32, tf32, bf16 or fp16"
    examples = ("bf16", "fp16")
    is_searched = True
    blamed_last = True
    value_type = str

    def by_hand(self, value: Any) -> Any:
        return precision_name(value)  # torch.bfloat16 and "bfloat16" are "bf16".

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, PRECISIONS)

    def in_loop(self, profile: Profile) -> Scalar:
        return profile.reference.precision

    def refusal(self, profile: Profile) -> Note | None:
        return _bitwise_only(profile)

    def phrase(self, value: Scalar) -> str:
        return str(value)

    def label(self, value: Scalar) -> str:
        return str(value)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.mixed_precision import tf32

        return tf32.hold() if value == "tf32" else None  # A run opens the autocast contexts itself.


def _bitwise_only(profile: Profile) -> Note | None:
    why = profile.loop.bitwise_only
    return Note("loop.bitwise_only", why) if why else None


def precision_refusal(device: DeviceSpec, precision: str) -> Note | None:
    """Return the reason not to try a precision on a device, or None.

    A dtype without hardware support can make a step last minutes, so matrix products are timed first. A precision with
    hardware instructions is never refused: other processes may have disturbed the timing.
    """
    if precision == "tf32" and device.kind != "cuda":
        return Note("precision.unsupported", f"{device.kind} does not support tf32")
    if precision in device.native:
        return None
    ours, base = device.peak(precision), device.peak("fp32")
    if precision != "fp32" and ours is not None and base is not None and ours < SCREEN * base:
        text = f"not tried: {precision} matrix products run at {ours / base:.2g}x the speed of fp32 on this device"
        return Note("precision.slow", text)
    return None


def in_place(plan: Plan, name: str, reason: str) -> Plan:
    """Return a plan with its precision replaced."""
    choice = Choice(name, f"replaces {plan.precision.value}, because {reason}", Effect.ROUNDING, changed=True)
    if name in HALF or plan.fp32_modules.value is None:
        return plan.having(precision=choice)
    whole = Choice(None, f"no effect in {name}, because {reason}", Effect.ROUNDING)
    return plan.having(precision=choice, fp32_modules=whole)
