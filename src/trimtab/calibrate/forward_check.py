"""Check of the loss's use of the model, before any measurement."""

from __future__ import annotations

import contextlib

import torch

from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.errors import LossError
from trimtab.losses import require_unscaled
from trimtab.runtime.compiled_call import noting_calls
from trimtab.runtime.precision import dtype_of


def require_own_forward(subject: TrainingLoop, precision: str) -> None:
    """Compute the loss of the batch once, with gradients and in the loop's precision, and check the model's forward.

    Raises:
        LossError: the loss function raised, its result is not a loss, it did not call the model itself, the model
            runs under the loop's own autocast (which would override every precision that is tried), or the loss is
            multiplied by a `GradScaler`'s scale.
    """
    casts = set[torch.dtype | None]()
    _look(subject, precision, casts)
    if not casts:
        raise LossError(
            "loss_fn",
            got="a loss without a forward of the model",
            expected="one that calls model(...) itself, not a copy, a submodule or another method of it",
            hint="Wrap what it calls in a module whose forward computes it.",
        )
    own = casts - {None, dtype_of(precision)}
    if dtype_of(precision) is not None:  # The loop's own autocast to the same dtype is visible only without the plan's.
        in_fp32 = set[torch.dtype | None]()
        with contextlib.suppress(Exception):  # A loop that runs in half precision only is accepted.
            _look(subject, "fp32", in_fp32)
        own |= in_fp32 - {None}
    if own:
        name = str(own.pop()).removeprefix("torch.")
        raise LossError(
            "loss_fn",
            got=f"a loss whose forward is under an autocast of the loop's own ({name})",
            expected="one that leaves the precision to the plan, which tries several",
            hint="Take autocast and GradScaler out of the loop, and say what it computes in: "
            'reference=trimtab.Reference("bf16"), or "fp16".',
        )


def _look(subject: TrainingLoop, precision: str, casts: set[torch.dtype | None]) -> None:
    """Compute the loss and add the autocast dtype of the model's forwards to `casts`; None without autocast."""
    device = subject.device.type

    def note() -> None:
        casts.add(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)

    end = noting_calls(subject.model, note)
    try:
        loss, _ = subject.loss(precision=precision)
        require_unscaled(loss)
    finally:
        end()
