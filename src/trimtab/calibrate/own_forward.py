"""What a loss does with the model, seen once before anything is measured."""

from __future__ import annotations

import contextlib

import torch

from trimtab.calibrate.subject import Subject
from trimtab.core.errors import LossError
from trimtab.losses import require_unscaled
from trimtab.runtime.compiled import noting_calls
from trimtab.runtime.precision import dtype_of


def require_own_forward(subject: Subject, precision: str) -> None:
    """Take the loss of the batch once, as the loop does, gradients and precision included.

    Raises:
        LossError: the loss function raised, its result is not a loss, it did not call the model itself, the model
            runs under an autocast of the loop's own (whatever precision is tried, that would run), or the loss has the
            scale of a `GradScaler`.
    """
    casts = set[torch.dtype | None]()
    _look(subject, precision, casts)
    if not casts:
        raise LossError(
            "loss_fn",
            given="a loss without a forward of the model",
            expected="one that calls model(...) itself, not a copy, a submodule or another method of it",
            way_out="Wrap what it calls in a module whose forward computes it.",
        )
    own = casts - {None, dtype_of(precision)}
    if dtype_of(precision) is not None:  # an autocast of the loop's own to the same is told where there is no other
        in_fp32 = set[torch.dtype | None]()
        with contextlib.suppress(Exception):  # a loop that runs in half precision alone is not refused for it
            _look(subject, "fp32", in_fp32)
        own |= in_fp32 - {None}
    if own:
        name = str(own.pop()).removeprefix("torch.")
        raise LossError(
            "loss_fn",
            given=f"a loss whose forward is under an autocast of the loop's own ({name})",
            expected="one that leaves the precision to the plan, which tries several",
            way_out="Take autocast and GradScaler out of the loop, and say what it computes in: "
            'reference=trimtab.Reference("bf16"), or "fp16".',
        )


def _look(subject: Subject, precision: str, casts: set[torch.dtype | None]) -> None:
    """Take the loss, and add what its forwards are cast to; None of one that is not."""
    device = subject.device.type

    def note() -> None:
        casts.add(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)

    end = noting_calls(subject.model, note)
    try:
        loss, _ = subject.loss(precision=precision)
        require_unscaled(loss)
    finally:
        end()
