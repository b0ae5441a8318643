"""What a loss does with the model, seen once before anything is measured."""

from __future__ import annotations

import torch

from trimtab.calibrate.subject import Subject
from trimtab.core.errors import LossError
from trimtab.runtime.precision import dtype_of


def require_own_forward(subject: Subject, precision: str) -> None:
    """Take the loss of the batch once, as the loop does, gradients and precision included.

    Raises:
        LossError: the loss function raised, its result is not a loss, it did not call the model itself, or it casts by
            itself: whatever precision is tried, that would run.
    """
    device, casts = subject.device.type, []

    def note(*_: object) -> None:
        casts.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)

    watching = subject.model.register_forward_pre_hook(note)
    try:
        subject.loss(precision=precision)
    finally:
        watching.remove()
    if not casts:
        raise LossError(
            "loss_fn",
            given="a loss without a forward of the model",
            expected="one that calls model(...) itself, not a copy, a submodule or another method of it",
            way_out="Wrap what it calls in a module whose forward computes it.",
        )
    if own := {cast for cast in casts if cast not in (None, dtype_of(precision))}:
        name = str(own.pop()).removeprefix("torch.")
        raise LossError(
            "loss_fn",
            given=f"a loss that enters autocast ({name}) itself",
            expected="one that leaves the precision to the plan, which tries several",
            way_out="Take autocast and GradScaler out of the loop, and say what it computes in: "
            'reference=trimtab.Reference("bf16"), or "fp16".',
        )
